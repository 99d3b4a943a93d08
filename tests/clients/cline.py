"""Take one turn with Cline: the first at its command line, a later one as an editor does.

`python cline.py PROGRAM ARGUMENT... TEXT`. Cline's command line continues a session only at a terminal;
editors continue it over the Agent Client Protocol (JSON-RPC on stdin and stdout). It is the newest session of
the home.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any, Final

# With --acp Cline takes them from nowhere else.
VARIABLES: Final = {"CLINE_PROVIDER": "openai-compatible", "CLINE_MODEL": "local", "CLINE_API_KEY": "none"}


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


def continued(agent: Agent, session: str, text: str) -> None:
    agent.call("initialize", protocolVersion=1, clientCapabilities={})
    agent.call("session/load", sessionId=session, cwd=str(Path.cwd()), mcpServers=[])
    prompt = [{"type": "text", "text": text}]
    ended = agent.call("session/prompt", sessionId=session, prompt=prompt)["stopReason"]
    if ended != "end_turn":
        raise RuntimeError(f"the turn ended with {ended}")


def main(program: str, *words: str) -> None:
    listed = subprocess.run([program, "history", "--json"], capture_output=True, text=True, check=True)
    sessions = json.loads(listed.stdout)
    if not sessions:
        subprocess.run([program, *words], check=True)
        return
    with subprocess.Popen(
        [program, "--acp"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **VARIABLES},
    ) as process:
        assert process.stdin
        assert process.stdout
        continued(Agent(process.stdin, process.stdout), sessions[0]["sessionId"], words[-1])
        process.stdin.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
