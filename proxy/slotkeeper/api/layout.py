"""Generation requests laid out: which strings of a body reach its prompt, and where they stand.

Nothing is copied and nothing converted, unlike in api.openai, api.anthropic and api.responses: a text
here is the body's own, and its path leads back to it. Media stand in no text.
"""

from __future__ import annotations

from typing import Any, Final

from slotkeeper.api import layout_anthropic, layout_responses
from slotkeeper.api.document import Doc, NotOurs, rows, table, text
from slotkeeper.api.layout_parts import mark, options, section_of, strings, tools
from slotkeeper.api.layouts import SeenRequest, listed
from slotkeeper.api.routes import Api
from slotkeeper.conversation.requests.layout import Call, Layout, Message, Path, Role, Section, Text

__all__ = ["lay_out"]

_ROLES: Final = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
    "function": Role.TOOL,
}
_PARTS: Final = {"text": "text", "refusal": "refusal"}  # a part's type, and where its string is


def lay_out(api: Api, doc: Doc, before: SeenRequest | None = None) -> Layout | None:
    """The request in `doc`, sent to a route of `api`; None where we cannot read it, or it is no chat.

    Messages that are equal in `before` are taken from there.
    """
    try:
        match api:
            case Api.CHAT:
                return _chat(doc, before)
            case Api.MESSAGES:
                return layout_anthropic.lay_out(doc, before)
            case Api.RESPONSES:
                return layout_responses.lay_out(doc, before)
            case _:
                return None
    except NotOurs:
        return None


def _chat(doc: Doc, before: SeenRequest | None) -> Layout | None:
    given, offered = doc.get("messages"), tools(doc)
    if offered is None or not isinstance(given, list) or not all(isinstance(m, dict) for m in given):
        return None
    return Layout(listed(given, "messages", _message, before), offered, options=options(doc))


def _message(message: Doc, path: Path) -> Message:
    role = _ROLES.get(text(message, "role"), Role.USER)
    content = message.get("content")
    media = _media(content)
    return Message(
        role=role,
        path=path,
        texts=strings(content, (*path, "content"), section_of(role), _PARTS),
        calls=_calls(message.get("tool_calls"), path) if role is Role.ASSISTANT else (),
        answers=_answers(message, path) if role is Role.TOOL else (),
        reasoning=_reasoning(message, path) if role is Role.ASSISTANT else None,
        media=media,
        content=None if media else content,
    )


def _media(content: Any) -> tuple[bytes, ...]:
    return tuple(mark(part) for part in rows(content) if text(part, "type") not in _PARTS)


def _calls(calls: Any, path: Path) -> tuple[Call, ...]:
    if not isinstance(calls, list):
        return ()
    return tuple(
        _call(call, (*path, "tool_calls", n))
        for n, call in enumerate(calls)
        if isinstance(call, dict) and isinstance(call.get("function"), dict)
    )


def _call(call: Doc, path: Path) -> Call:
    function = table(call, "function")
    return Call(
        name=text(function, "name"),
        id=text(call, "id"),
        id_path=(*path, "id"),
        arguments=function.get("arguments", ""),
        arguments_path=(*path, "function", "arguments"),
    )


def _answers(message: Doc, path: Path) -> tuple[Text, ...]:
    call = message.get("tool_call_id")
    return (Text((*path, "tool_call_id"), call, Section.RESULT),) if isinstance(call, str) else ()


def _reasoning(message: Doc, path: Path) -> Text | None:
    """Under the engine's own name for it, unless the client has another."""
    for key in ("reasoning_content", "reasoning"):
        if isinstance(message.get(key), str):
            return Text((*path, key), message[key], Section.REASONING)
    if message.get("reasoning_content") is not None:
        return None
    return Text((*path, "reasoning_content"), "", Section.REASONING)
