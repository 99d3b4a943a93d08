"""Give an agent one message over the Agent Client Protocol (JSON-RPC on its stdin and stdout), as editors do.

`python acp.py PROGRAM ARGUMENT... TEXT` continues the session that `session.txt` names, if there is one. For
agents whose command line continues a session only at a terminal.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import IO, Any, Final

SESSION: Final = Path("session.txt")


class Agent:
    """An agent that reads requests from `stdin` and answers on `stdout`."""

    def __init__(self, stdin: IO[str], stdout: IO[str]) -> None:
        self._stdin = stdin
        self._stdout = stdout

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the result; what the agent says until then is printed. Raises RuntimeError."""
        request = {"jsonrpc": "2.0", "id": method, "method": method, "params": params}
        print(json.dumps(request), file=self._stdin, flush=True)
        for line in self._stdout:
            message = json.loads(line)
            if message.get("id") == method:
                if "error" in message:
                    raise RuntimeError(message["error"])
                return message["result"] or {}
            print(line, end="")  # noqa: T201 - the test reads it
        raise RuntimeError("the agent has ended")


def turn(agent: Agent, text: str) -> None:
    where: dict[str, Any] = {"cwd": str(Path.cwd()), "mcpServers": []}
    agent.call("initialize", protocolVersion=1, clientCapabilities={})
    if SESSION.exists():
        session = SESSION.read_text()
        agent.call("session/load", sessionId=session, **where)
    else:
        session = agent.call("session/new", **where)["sessionId"]
        SESSION.write_text(session)
    prompt = [{"type": "text", "text": text}]
    ended = agent.call("session/prompt", sessionId=session, prompt=prompt)["stopReason"]
    if ended != "end_turn":
        raise RuntimeError(f"the turn ended with {ended}")


if __name__ == "__main__":
    *words, text = sys.argv[1:]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        turn(Agent(process.stdin, process.stdout), text)
        process.stdin.close()
