"""Agents that ask beside their conversation: for a summary of it (compaction), or for a recap of it.

Each shape is that of a real client, with other texts. `ideal` plays the same session as a client would write
it for a prefix cache: the question follows the agent's own head and history, with its instructions in the
same message. Its oracle is what a session costs if only new text has to be computed.

After a summary the agent goes on with the summary in place of its history, after a recap with all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from benchmarks.rewriters import scripted_call, tools
from slotkeeper.api.document import Doc
from slotkeeper.bench.target import PLAIN, Script, Turn
from slotkeeper.bench.texts import prose, result

TURNS: Final = 6
ASKED_AFTER: Final = (2, 4)  # turns after which the client asks
ASKED: Final = "asked"  # the label of these requests
REPLY: Final = 16  # tokens
HEAD: Final = {"role": "system", "content": prose(6000, 40)}
TOOLS: Final = tools()
INSTRUCTIONS: Final = f"You write summaries of conversations. {prose(900, 41)}"
QUESTION: Final = f"Summarize the conversation above now. {prose(300, 42)}"
# By such words Claude Code is known, whose request for a summary offers a tool.
CLAUDE: Final = "You are a helpful AI assistant tasked with summarizing conversations."
CLAUDE_QUESTION: Final = (
    f"Your task is to create a detailed summary of the conversation so far. {prose(900, 43)}"
)
SUMMARY: Final = f"This is a summary of the work so far: {prose(1500, 44)}"


@dataclass(frozen=True, slots=True)
class Asker:
    """One client."""

    system: str | None  # of the request that asks; None: the agent's own
    question: str
    tools: Sequence[Doc] = ()
    replaces: bool = True  # the answer replaces the history
    as_text: bool = False  # the history is sent as text, in one message

    def __call__(self, *, ideal: bool = False) -> Script:
        """Return the session."""
        chat: list[Doc] = []
        for turn in range(TURNS):
            call = scripted_call(turn)
            chat += [_user(f"Task {turn + 1}. {prose(500, 50 + turn)}"), call]
            chat += [result(call, prose(2500, 60 + turn))]
            reply = yield _turn(f"turn {turn + 1}", [HEAD, *chat], TOOLS)
            chat.append({"role": "assistant", "content": reply.get("content") or ""})
            if turn in ASKED_AFTER:
                yield self._ideal(chat) if ideal else self._asks(chat)
                chat = [_user(SUMMARY)] if self.replaces else chat

    def _asks(self, chat: Sequence[Doc]) -> Turn:
        system = HEAD if self.system is None else {"role": "system", "content": self.system}
        if self.as_text:
            said = "\n\n".join(f"[{message['role']}]: {message['content']}" for message in chat)
            return _turn(ASKED, [system, _user(f"{said}\n\n{self.question}")], self.tools)
        return _turn(ASKED, [system, *chat, _user(self.question)], self.tools)

    def _ideal(self, chat: Sequence[Doc]) -> Turn:
        asked = "\n\n".join(filter(None, (self.system, self.question)))
        return _turn(ASKED, [HEAD, *chat, _user(asked)], TOOLS)


def _user(text: str) -> Doc:
    return {"role": "user", "content": text}


def _turn(label: str, messages: Sequence[Doc], offered: Sequence[Doc]) -> Turn:
    fields: dict[str, Any] = {**PLAIN, **({"tools": [*offered]} if offered else {})}
    return Turn(label=label, messages=tuple(messages), max_tokens=REPLY, fields=fields)


ASKERS: Final[Mapping[str, Asker]] = MappingProxyType(
    {
        "codex": Asker(None, QUESTION),  # 0.169: the same head without tools
        "qwen-code": Asker(INSTRUCTIONS, QUESTION),  # 0.24
        "claude-code": Asker(CLAUDE, CLAUDE_QUESTION, TOOLS[:1]),
        "recap": Asker(INSTRUCTIONS, QUESTION, replaces=False),  # can1357/oh-my-pi#12362
        "as text": Asker(INSTRUCTIONS, QUESTION, as_text=True),  # opencode 1.18, pi 0.73
    }
)
"""The clients, by the shape of their requests. What is sent as text is new text: no cache can help."""
