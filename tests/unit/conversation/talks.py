"""Short sessions in the shape of real clients' requests, and an index of conversations that records them."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

from slotkeeper.api.head import Api
from slotkeeper.api.request import lay_out
from slotkeeper.conversation.causes import Explained, explain
from slotkeeper.conversation.layout import Conversation, Layout, Match, Who
from slotkeeper.conversation.likeness import Conversations

SYSTEM = (
    "You are an agent that edits code.\n\n"
    "<env>\n  Working directory: /home/dev/shop\n  Platform: linux\n  Today's date: Sat Nov 21 2026\n</env>\n"
    + "Rules of the house. "
    * 80
)
ME = Who("key/agent", "ses_1")
UNNAMED = Who("key/agent")


def tool(name: str, **properties: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {
        "type": "function",
        "function": {"name": name, "description": f"Call {name}.", "parameters": schema},
    }


TOOLS = [
    tool("read", path="string"),
    tool("edit", path="string", old="string", new="string"),
    tool("bash", command="string"),
]


def system(text: str = SYSTEM) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def reply(text: str = "", reasoning: str = "", **calls: Any) -> dict[str, Any]:
    """Return an assistant's message; a keyword is the name of a tool, its value the arguments."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call_{name}",
                "type": "function",
                "function": {"name": name, "arguments": as_text(given)},
            }
            for name, given in calls.items()
        ]
    return message


def as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def result(name: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{name}", "content": text}


def chat(*messages: dict[str, Any], tools: list[dict[str, Any]] | None = None, **options: Any) -> Layout:
    offered = TOOLS if tools is None else tools
    body = {"messages": list(messages), "tools": offered, **options}
    layout = lay_out(Api.CHAT, deepcopy(body))  # a copy, as if parsed from separate bytes
    assert layout is not None
    return layout


TASK = user("Fix the bug in the parser, and add a test for it.")
ROUND = (
    reply(reasoning="Look first.", read={"path": "src/parser.py"}),
    result("read", "def parse(line):\n    return line.split(',')\n" * 30),
)
SECOND = (
    reply(reasoning="Now edit.", edit={"path": "src/parser.py", "old": "a", "new": "b"}),
    result("edit", "The file src/parser.py was written, with 12 lines in it. " * 12),
)
DONE = reply("Done: the parser reads quoted fields now.")
NEXT = user("Now do the same for the writer.")
HISTORY = (TASK, *ROUND, *SECOND)


class Clients:
    """Clients whose requests are recorded in an index of conversations, with a clock of its own."""

    def __init__(self, **bounds: int) -> None:
        self.book = Conversations(**bounds)
        self.at = 0.0

    def sends(self, layout: Layout, who: Who = ME) -> tuple[Match, Conversation]:
        self.at += 1
        match = self.book.find(who, layout)
        line = self.book.saw(match, who, received=layout, sent=layout, notes={}, now=self.at)
        return match, line

    def explains(self, layout: Layout, who: Who = ME) -> Explained:
        explained = explain(self.book.find(who, layout), layout)
        self.sends(layout, who)
        return explained


def explained(old: Layout, new: Layout, who: Who = ME) -> Explained:
    """Return the report on the second of two requests."""
    clients = Clients()
    clients.sends(old, who)
    return clients.explains(new, who)
