"""OpenAI Responses bodies laid out, one message per item.

An item that the engine does not know is refused by it, and so by us (as in api.responses).
"""

from __future__ import annotations

from typing import Any, Final

from slotkeeper.api.document import Doc, NotOurs, rows, table, text
from slotkeeper.api.layout_parts import mark, options, section_of, strings, tools
from slotkeeper.api.layouts import SeenRequest, listed
from slotkeeper.conversation.requests.layout import Call, Layout, Message, Path, Role, Section, Text

_ASKING: Final = {"user": Role.USER, "system": Role.SYSTEM, "developer": Role.SYSTEM}
_ASKED: Final = {"input_text": "text"}
_SAID: Final = {"output_text": "text", "input_text": "text", "refusal": "refusal"}
_IMAGE: Final = "input_image"


def lay_out(doc: Doc, before: SeenRequest | None = None) -> Layout | None:
    """A /v1/responses body; None where we cannot read it."""
    given, offered = doc.get("input"), tools(doc)
    if offered is None:
        return None
    messages = list(_instructions(doc))
    if isinstance(given, str):
        messages.append(Message(Role.USER, ("input",), (Text(("input",), given, Section.USER),)))
    elif isinstance(given, list):
        messages += listed(given, "input", _read, before)
    else:
        return None
    return Layout(tuple(messages), offered, options=_options(doc))


def _instructions(doc: Doc) -> tuple[Message, ...]:
    if "instructions" not in doc:
        return ()
    path = ("instructions",)
    return (Message(Role.SYSTEM, path, strings(doc["instructions"], path, Section.SYSTEM, {})),)


def _options(doc: Doc) -> Doc:
    effort = table(doc, "reasoning").get("effort")
    return options(doc) if effort is None else {**options(doc), "reasoning_effort": effort}


def _read(item: Any, path: Path) -> Message:
    message = _item(item, path)
    if message is None:
        raise NotOurs("input item")
    return message


def _item(item: Any, path: Path) -> Message | None:
    if not isinstance(item, dict):
        return None
    kind, role = item.get("type"), text(item, "role")
    if role in _ASKING and isinstance(item.get("content"), str | list):
        return _spoken(item, path, _ASKING[role])
    if role == "assistant" and kind == "message":
        return _reply(item, path)
    match kind:
        case "function_call":
            return _call(item, path)
        case "function_call_output":
            return _result(item, path)
        case "reasoning":
            return _reasoning(item, path)
        case _:
            return None


def _spoken(item: Doc, path: Path, role: Role) -> Message | None:
    content = item["content"]
    if not _asked(content):
        return None
    texts = strings(content, (*path, "content"), section_of(role), _ASKED)
    media = _media(content)
    return Message(role, path, texts, media=media, content=None if media else content)


def _reply(item: Doc, path: Path) -> Message | None:
    texts = strings(item.get("content"), (*path, "content"), Section.REPLY, _SAID)
    if isinstance(item.get("content"), list) and len(texts) != len(item["content"]):
        return None
    return Message(Role.ASSISTANT, path, texts)


def _call(item: Doc, path: Path) -> Message | None:
    match item:
        case {"call_id": str(call), "name": str(name), "arguments": str(arguments)}:
            made = Call(name, call, (*path, "call_id"), arguments, (*path, "arguments"))
            return Message(Role.ASSISTANT, path, calls=(made,))
        case _:
            return None


def _result(item: Doc, path: Path) -> Message | None:
    output, call = item.get("output"), item.get("call_id")
    if not isinstance(call, str) or not isinstance(output, str | list) or not _asked(output):
        return None
    return Message(
        role=Role.TOOL,
        path=path,
        texts=strings(output, (*path, "output"), Section.RESULT, _ASKED),
        answers=(Text((*path, "call_id"), call, Section.RESULT),),
        media=_media(output),
    )


def _reasoning(item: Doc, path: Path) -> Message | None:
    match item:
        case {"summary": list(), "content": [{"text": str(thought)}, *_]}:
            reasoning = Text((*path, "content", 0, "text"), thought, Section.REASONING)
            return Message(Role.ASSISTANT, path, reasoning=reasoning)
        case _:
            return None


def _asked(content: str | list[Any]) -> bool:
    """Whether the engine takes it: a string, or parts of the two kinds that it knows."""
    return isinstance(content, str) or all(_known(part) for part in content)


def _known(part: Any) -> bool:
    match part:
        case {"type": "input_text", "text": _} | {"type": "input_image", "image_url": _}:
            return True
        case _:
            return False


def _media(content: str | list[Any]) -> tuple[bytes, ...]:
    return tuple(mark(part) for part in rows(content) if part["type"] == _IMAGE)
