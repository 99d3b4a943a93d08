"""Anthropic Messages: the chat body that llama-server makes from a body, its layout, and its answers.

`shape` mirrors the engine's own converter (engine.md 1.2, 1.3; the same on both builds). The engine has no
render route for this API, so the chat body is how we get the token ids. `thinking` and `cache_control` do not
reach the template. Answers carry no timings (engine.md 1.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import orjson

from slotkeeper.api.answers.answer_builder import AnswerBuilder
from slotkeeper.api.document import (
    SECTIONS,
    Doc,
    NotOurs,
    SeenRequest,
    Shape,
    compact,
    integer,
    listed,
    mark,
    pick,
    rows,
    strings,
    table,
    text,
    tools,
)
from slotkeeper.api.formats.openai import carries_media
from slotkeeper.conversation.layout import Call, Layout, Message, Path, Role, Section, Text
from slotkeeper.conversation.rules.rules import without_stamp

_ROLES: Final = {"assistant": Role.ASSISTANT, "system": Role.SYSTEM}
_PARTS: Final = {"text": "text"}
_OPTIONS: Final = ("chat_template_kwargs",)


def lay_out_messages(doc: Doc, before: SeenRequest | None = None) -> Layout | None:
    """Return the layout of a /v1/messages body; None if it cannot be read."""
    given, offered = doc.get("messages", ...), tools(doc)
    if offered is None or given is ...:
        return None
    entries = given if isinstance(given, list) else []
    if not all(isinstance(message, dict) for message in entries):
        return None
    messages = listed(entries, "messages", _message, before)
    system = _system_messages(doc)
    return Layout(system + messages, offered, options=pick(doc, _OPTIONS), no_calls=None)


def _system_messages(doc: Doc) -> tuple[Message, ...]:
    if doc.get("system") is None:
        return ()
    path = ("system",)
    texts = strings(doc["system"], path, Section.SYSTEM, _PARTS)
    return (Message(Role.SYSTEM, path, texts, doc=pick(doc, path)),)


def _message(message: Doc, path: Path) -> Message:
    role = _ROLES.get(text(message, "role"), Role.USER)
    content, inner = message.get("content"), (*path, "content")
    if not isinstance(content, list):
        return Message(role, path, strings(content, inner, SECTIONS[role], _PARTS), content=content)
    if any(block.get("type") == "tool_result" for block in rows(content)):
        role = Role.TOOL  # also with a reminder beside the results: clients add and remove those
    return _message_of(role, path, content, inner)


def _message_of(role: Role, path: Path, content: list[Any], inner: Path) -> Message:
    texts: list[Text] = []
    calls: list[Call] = []
    answers: list[Text] = []
    thoughts: list[Text] = []
    media: list[bytes] = []
    section = Section.USER if role is Role.TOOL else SECTIONS[role]
    for n, block in enumerate(content):
        if not isinstance(block, dict):
            continue
        match block.get("type"):
            case "text":
                texts += _string(block, "text", (*inner, n), section)
            case "thinking":
                thoughts += _string(block, "thinking", (*inner, n), Section.REASONING)
            case "tool_use":
                calls.append(_tool_use(block, (*inner, n)))
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


def _tool_use(block: Doc, path: Path) -> Call:
    given = block.get("input")
    return Call(
        name=text(block, "name"),
        id=text(block, "id"),
        id_path=(*path, "id"),
        arguments={} if given is None else given,
        arguments_path=(*path, "input"),
    )


# -- answers ---------------------------------------------------------------------------------------------

_SILENT: Final = frozenset({"ping", "content_block_stop"})


@dataclass(slots=True, eq=False)
class AnthropicReading:
    """Reads the events from message_start to message_stop, or a whole message."""

    draft: AnswerBuilder

    def event(self, name: str, data: bytes) -> None:
        """Read one event. Events that carry neither a figure nor a token are not parsed."""
        if name in _SILENT:
            return
        doc = orjson.loads(data)
        bare = name == "error" and "error" not in doc  # llama-server sends the error alone
        if self.draft.failed({"error": doc} if bare else doc):
            return
        match doc.get("type"):
            case "message_start":
                self.draft.opened = True
                self._usage(table(doc, "message"))
            case "message_delta":
                self._usage(doc)
            case "message_stop":
                self.draft.complete = self.draft.error is None
            case "content_block_start":
                self._block(doc.get("index"), table(doc, "content_block"))
            case "content_block_delta":
                self._delta(doc.get("index"), table(doc, "delta"))
            case _:
                pass

    def body(self, doc: Any) -> None:
        """Read a whole message."""
        self.draft.opened = True
        self._usage(doc)
        for index, block in enumerate(rows(doc.get("content"))):
            self._block(index, block)

    def _block(self, index: Any, block: Doc) -> None:
        self.draft.say(block.get("text"))
        self.draft.think(block.get("thinking"))
        if block.get("type") == "tool_use":
            given = block.get("input")
            # A stream begins the block with an empty input and sends the input's text in later events.
            arguments = compact(given) if given else None
            self.draft.call(index, name=block.get("name"), call_id=block.get("id"), arguments=arguments)

    def _delta(self, index: Any, delta: Doc) -> None:
        self.draft.say(delta.get("text"))
        self.draft.think(delta.get("thinking"))
        if delta.get("type") == "input_json_delta":
            self.draft.call(index, arguments=delta.get("partial_json"))

    def _usage(self, doc: Doc) -> None:
        usage = table(doc, "usage")
        fresh, cached = integer(usage.get("input_tokens")), integer(usage.get("cache_read_input_tokens")) or 0
        self.draft.usage(generated=usage.get("output_tokens"))
        if fresh is not None:
            self.draft.usage(prompt=fresh + cached, cached=cached)


# -- the chat body that llama-server makes from it, for rendering ----------------------------------------

_CHOICES: Final = {"auto": "auto", "any": "required", "tool": "required"}


def shape(doc: Doc) -> Shape:
    """Return the chat body that the engine makes from a /v1/messages body. Raises NotOurs."""
    if "messages" not in doc:
        raise NotOurs("messages")
    lead = _system(doc.get("system"))
    messages = lead + _messages(doc["messages"])
    chat: Doc = {"messages": messages, **pick(doc, ("model", "chat_template_kwargs"))}
    if isinstance(doc.get("tools"), list):
        chat["tools"] = [_tool(tool) for tool in rows(doc["tools"])]
    choice = _CHOICES.get(text(table(doc, "tool_choice"), "type"))
    if choice is not None:
        chat["tool_choice"] = choice
    return Shape(chat=chat, lead=len(lead), media=carries_media(messages))


def _system(system: Any) -> list[Doc]:
    if system is None:
        return []
    if isinstance(system, str):
        content = without_stamp(system)
    else:
        blocks = [block for block in rows(system) if block.get("type") == "text"]
        content = "".join(without_stamp(text(block, "text")) for block in blocks)
    return [{"role": "system", "content": content}]


def _tool(tool: Doc) -> Doc:
    function = {
        "name": text(tool, "name"),
        "description": text(tool, "description"),
        "parameters": tool.get("input_schema", {}),
    }
    return {"type": "function", "function": function}


def _messages(messages: Any) -> list[Doc]:
    converted: list[Doc] = []
    for message in messages if isinstance(messages, list) else []:
        if not isinstance(message, dict):
            raise NotOurs("messages")
        if isinstance(message.get("content"), list):
            converted += _blocks(text(message, "role"), rows(message["content"]))
        elif "content" in message or message.get("role") != "assistant":
            converted.append(message)
    return converted


def _blocks(role: str, blocks: list[Doc]) -> list[Doc]:
    """Convert a message of blocks: one message for its content, then a tool message per tool result."""
    content: list[Doc] = []
    calls: list[Doc] = []
    results: list[Doc] = []
    reasoning = ""
    for block in blocks:
        match block.get("type"):
            case "text":
                content.append(block)
            case "thinking":
                reasoning += text(block, "thinking")
            case "image":
                content += _image(block)
            case "tool_use":
                calls.append(_call(block))
            case "tool_result":
                results.append(_result(block))
            case _:  # the engine skips blocks that it does not know, redacted_thinking among them
                pass
    if not (content or calls or reasoning):
        return results
    message: Doc = {"role": role, "content": content or ""}
    if calls:
        message["tool_calls"] = calls
    if reasoning:
        message["reasoning_content"] = reasoning
    return [message, *results]


def _call(block: Doc) -> Doc:
    arguments = block.get("input")
    function = {"name": text(block, "name"), "arguments": compact({} if arguments is None else arguments)}
    return {"id": text(block, "id"), "type": "function", "function": function}


def _result(block: Doc) -> Doc:
    content: Any = block.get("content")
    if isinstance(content, list):
        parts: list[Doc] = []
        for part in rows(content):
            if part.get("type") == "text":
                parts.append({"type": "text", "text": text(part, "text")})
            elif part.get("type") == "image":
                parts += _image(part)
        media = any(part.get("type") == "image" for part in rows(content))
        content = parts if media else "".join(part["text"] for part in parts)
    elif not isinstance(content, str):
        content = ""
    return {"role": "tool", "tool_call_id": text(block, "tool_use_id"), "content": content}


def _image(block: Doc) -> list[Doc]:
    source = table(block, "source")
    match source.get("type"):
        case "base64":
            url = f"data:{text(source, 'media_type', 'image/jpeg')};base64,{text(source, 'data')}"
        case "url":
            url = text(source, "url")
        case _:
            return []
    return [{"type": "image_url", "image_url": {"url": url}}]
