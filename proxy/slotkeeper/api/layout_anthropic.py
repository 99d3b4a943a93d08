"""Anthropic Messages bodies laid out. Blocks that the engine skips (engine.md 1.3) are skipped here too."""

from __future__ import annotations

from typing import Any, Final

from slotkeeper.api.document import Doc, pick, rows, text
from slotkeeper.api.layout_parts import mark, section_of, strings, tools
from slotkeeper.api.layouts import SeenRequest, listed
from slotkeeper.conversation.requests.layout import Call, Layout, Message, Path, Role, Section, Text

_ROLES: Final = {"assistant": Role.ASSISTANT, "system": Role.SYSTEM}
_PARTS: Final = {"text": "text"}
_OPTIONS: Final = ("chat_template_kwargs",)


def lay_out(doc: Doc, before: SeenRequest | None = None) -> Layout | None:
    """A /v1/messages body; None where we cannot read it."""
    given, offered = doc.get("messages", ...), tools(doc)
    if offered is None or given is ...:
        return None
    said = given if isinstance(given, list) else []
    if not all(isinstance(message, dict) for message in said):
        return None
    messages = listed(said, "messages", _message, before)
    return Layout(_system(doc) + messages, offered, options=pick(doc, _OPTIONS))


def _system(doc: Doc) -> tuple[Message, ...]:
    if doc.get("system") is None:
        return ()
    path = ("system",)
    return (Message(Role.SYSTEM, path, strings(doc["system"], path, Section.SYSTEM, _PARTS)),)


def _message(message: Doc, path: Path) -> Message:
    role = _ROLES.get(text(message, "role"), Role.USER)
    content, inner = message.get("content"), (*path, "content")
    if not isinstance(content, list):
        return Message(role, path, strings(content, inner, section_of(role), _PARTS), content=content)
    if any(block.get("type") == "tool_result" for block in rows(content)):
        role = Role.TOOL  # also where a reminder stands beside the results, which comes and goes
    return _blocks(role, path, content, inner)


def _blocks(role: Role, path: Path, content: list[Any], inner: Path) -> Message:
    texts: list[Text] = []
    calls: list[Call] = []
    answers: list[Text] = []
    thoughts: list[Text] = []
    media: list[bytes] = []
    said = Section.USER if role is Role.TOOL else section_of(role)
    for n, block in enumerate(content):
        if not isinstance(block, dict):
            continue
        match block.get("type"):
            case "text":
                texts += _string(block, "text", (*inner, n), said)
            case "thinking":
                thoughts += _string(block, "thinking", (*inner, n), Section.REASONING)
            case "tool_use":
                calls.append(_call(block, (*inner, n)))
            case "tool_result":
                result = block.get("content")
                texts += strings(result, (*inner, n, "content"), Section.RESULT, _PARTS)
                answers += _string(block, "tool_use_id", (*inner, n), Section.RESULT)
                media += [mark(part) for part in rows(result) if part.get("type") == "image"]
            case "image":
                media.append(mark(block))
            case _:
                pass
    return Message(
        role=role,
        path=path,
        texts=(*thoughts[1:], *texts),
        calls=tuple(calls),
        answers=tuple(answers),
        reasoning=thoughts[0] if thoughts else None,
        media=tuple(media),
        content=None if media else content,
    )


def _string(block: Doc, key: str, path: Path, section: Section) -> tuple[Text, ...]:
    value = block.get(key)
    return (Text((*path, key), value, section),) if isinstance(value, str) else ()


def _call(block: Doc, path: Path) -> Call:
    given = block.get("input")
    return Call(
        name=text(block, "name"),
        id=text(block, "id"),
        id_path=(*path, "id"),
        arguments={} if given is None else given,
        arguments_path=(*path, "input"),
    )
