"""An agent's requests, as bodies of one of three APIs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from slotkeeper.api.head import Api

Doc = dict[str, Any]

# Phrases of clients' system texts; the parts in braces change between requests.
CLIENTS = {
    "claude": (
        "x-anthropic-billing-header: cc_version=2.1.37.3a3; cc_entrypoint=cli; cch={nonce};\n"
        "You are an agent.\n<env>\nWorking directory: {cwd}\nIs directory a git repo: Yes\n"
        "Platform: {platform}\nOS Version: Linux 6.8\nToday's date: {day}\n</env>\n\n"
        "gitStatus: This is the git status at the start of the conversation.\n\nCurrent branch: main\n\n"
        "Status:\nM {changed}\n\nRecent commits:\n{commit} Tidy up"
    ),
    "opencode": (
        "You are an agent.\n<env>\n  Working directory: {cwd}\n  Platform: {platform}\n"
        "  Today's date: {weekday} {month} {number} 2026\n</env>\n"
        "Instructions from: /home/dev/AGENTS.md\n# Notes\n- {memory}\n"
        "\nSkills provide specialized instructions and workflows.\n"
    ),
    "pi": (
        "You are an agent.\n\n# Project Context\n\nProject-specific instructions and guidelines:\n\n"
        "## /home/dev/AGENTS.md\n\n# Notes\n- {memory}\n\n\n"
        "Current date: {day}\nCurrent working directory: {cwd}"
    ),
    "qwen": (
        "You are an agent.\n\n# Repository\ngit: Current branch: main\ngit: Status:\ngit: M {changed}\n"
        "git: Recent commits:\ngit: {commit} Tidy up\n\n# Rules\nBe brief."
    ),
    "continue": (
        "You are an agent.\n<env>\nPlatform: {platform}\nToday's date: {day}\n</env>\n\nAs you answer:\n"
        '<context name="gitStatus">This is the git status at the start of the conversation.\n\n'
        "M {changed}\n</context>\n"
    ),
    "vibe": "You are an agent.\nToday's date is {day} (Saturday).\n\n## Rules\nBe brief.\n",
    "codex": "You are an agent.\n\n# Rules\nBe brief.\n",
    "kimi": (
        "You are an agent.\n\nThe current date and time in ISO format is `{day}T{clock}`. "
        "This is only a reference.\n"
    ),
}
# Texts in front of a user's first message.
CONTEXTS = {
    "claude": (
        "<system-reminder>\nAs you answer, you can use this context:\n# currentDate\n"
        "Today's date is {day}.\n</system-reminder>\n"
        "<system_warning>Token usage: {used}/200000; {left} remaining</system_warning>\n"
    ),
    "codex": (
        "<environment_context>\n  <cwd>{cwd}</cwd>\n  <shell>bash</shell>\n"
        "  <current_date>{day}</current_date>\n</environment_context>\n"
    ),
    "qwen": (
        "<system-reminder>\nThe current date is: {weekday}, {month} {number}, 2026. "
        "Note: This is the authoritative date.\n</system-reminder>\n"
    ),
}


@dataclass
class Reply:
    """A reply as the model samples it."""

    content: str
    thought: str
    calls: list[tuple[str, str, str]]  # id, name, text of the arguments

    @property
    def told(self) -> Doc:
        """Return the reply as the engine sends it."""
        said: Doc = {"role": "assistant", "content": self.content}
        if self.thought:
            said["reasoning_content"] = self.thought
        if self.calls:
            said["tool_calls"] = [
                {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
                for id_, name, arguments in self.calls
            ]
        return said


@dataclass
class Said:
    """A user's message, and the reminder that was appended when it was new."""

    text: str
    reminder: str | None
    context: str = ""


@dataclass
class Answer:
    """The result of a call, as it is sent."""

    id: str
    output: str
    first: bool  # whether it is the first of one reply


Item = Said | Reply | Answer


def body_of(
    api: Api,
    system: str,
    tools: list[Doc],
    items: list[Item],
    *,
    parts: bool,
    emptied: Callable[[], str] | None,
) -> Doc:
    """Return a body. `parts`: content is a list.

    `emptied`: reasoning items have ids, and stay when they are emptied.
    """
    match api:
        case Api.CHAT:
            return _chat(system, tools, items, parts)
        case Api.MESSAGES:
            return _messages(system, tools, items, parts)
        case _:
            return _responses(system, tools, items, emptied)


def _chat(system: str, tools: list[Doc], items: list[Item], parts: bool) -> Doc:
    messages: list[Doc] = [{"role": "system", "content": system}]
    for item in items:
        match item:
            case Said():
                messages.append({"role": "user", "content": _content(_whole(item), parts)})
            case Answer():
                messages.append({"role": "tool", "tool_call_id": item.id, "content": item.output})
            case Reply():
                messages.append(item.told)
    offered = [{"type": "function", "function": tool} for tool in tools]
    return {"model": "m", "messages": messages, "tools": offered, "stream": True}


def _messages(system: str, tools: list[Doc], items: list[Item], parts: bool) -> Doc:
    messages: list[Doc] = []
    for item in items:
        match item:
            case Said():
                messages.append({"role": "user", "content": _content(_whole(item), parts)})
            case Answer():
                if item.first:
                    messages.append({"role": "user", "content": []})
                block = {"type": "tool_result", "tool_use_id": item.id, "content": item.output}
                messages[-1]["content"].append(block)
            case Reply():
                messages.append({"role": "assistant", "content": _blocks(item)})
    if isinstance(messages[-1]["content"], list):  # the mark moves from message to message
        messages[-1]["content"][-1] |= {"cache_control": {"type": "ephemeral"}}
    offered = [
        {"name": t["name"], "description": t["description"], "input_schema": t["parameters"]} for t in tools
    ]
    given = _content(system, parts)
    return {"model": "m", "system": given, "messages": messages, "tools": offered, "max_tokens": 9}


def _responses(system: str, tools: list[Doc], items: list[Item], emptied: Callable[[], str] | None) -> Doc:
    given: list[Doc] = []
    for item in items:
        match item:
            case Said():
                content = [{"type": "input_text", "text": _whole(item)}]
                given.append({"type": "message", "role": "user", "content": content})
            case Answer():
                given.append({"type": "function_call_output", "call_id": item.id, "output": item.output})
            case Reply():
                given += _items(item, emptied)
    offered = [{"type": "function", **tool} for tool in tools]
    return {"model": "m", "instructions": system, "input": given, "tools": offered, "store": False}


def _content(text: str, parts: bool) -> Any:
    return [{"type": "text", "text": text}] if parts else text


def _whole(said: Said) -> str:
    text = said.context + said.text
    if said.reminder is None:
        return text
    return f"{text}\n\n<system-reminder>\n{said.reminder}\n</system-reminder>"


def _blocks(reply: Reply) -> list[Doc]:
    found: list[Doc] = []
    if reply.thought:
        found.append({"type": "thinking", "thinking": reply.thought, "signature": "s"})
    if reply.content:
        found.append({"type": "text", "text": reply.content})
    return found + [
        {"type": "tool_use", "id": id_, "name": name, "input": json.loads(arguments)}
        for id_, name, arguments in reply.calls
    ]


def _items(reply: Reply, emptied: Callable[[], str] | None) -> Iterator[Doc]:
    if emptied is not None:
        content = [{"type": "reasoning_text", "text": reply.thought}]
        yield {"type": "reasoning", "id": emptied(), "summary": [], "content": content}
    if reply.content:
        content = [{"type": "output_text", "text": reply.content}]
        yield {"type": "message", "role": "assistant", "content": content}
    for id_, name, arguments in reply.calls:
        yield {"type": "function_call", "call_id": id_, "name": name, "arguments": arguments}
