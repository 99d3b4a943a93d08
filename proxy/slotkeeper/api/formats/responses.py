"""OpenAI Responses: the chat body that llama-server makes from a body, its layout, and its answers.

`shape` mirrors the engine's own converter (engine.md 1.2). The engine answers 400 to an item that it does not
know; for such an item `shape` raises `NotOurs`, and the request is forwarded unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import orjson

from slotkeeper.api.answers.answer_builder import AnswerBuilder
from slotkeeper.api.document import (
    HEAD,
    SECTIONS,
    Doc,
    NotOurs,
    SeenRequest,
    Shape,
    listed,
    mark,
    options,
    pick,
    rows,
    strings,
    table,
    text,
    tools,
)
from slotkeeper.api.formats.openai import carries_media
from slotkeeper.conversation.layout import Call, Layout, Message, Path, Role, Section, Text

_ROLES: Final = {"user": Role.USER, "system": Role.SYSTEM, "developer": Role.SYSTEM}
_INPUT_TEXTS: Final = {"input_text": "text"}
_OUTPUT_TEXTS: Final = {"output_text": "text", "input_text": "text", "refusal": "refusal"}
_IMAGE: Final = "input_image"


def lay_out_items(doc: Doc, before: SeenRequest | None = None) -> Layout | None:
    """Return the layout of a /v1/responses body; None if it cannot be read."""
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
    texts = strings(doc["instructions"], path, Section.SYSTEM, {})
    return (Message(Role.SYSTEM, path, texts, doc=pick(doc, path)),)


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
    if role in _ROLES and isinstance(item.get("content"), str | list):
        return _spoken(item, path, _ROLES[role])
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
    if not _accepted(content):
        return None
    texts = strings(content, (*path, "content"), SECTIONS[role], _INPUT_TEXTS)
    media = _media(content)
    doc = item if role is Role.SYSTEM else None
    return Message(role, path, texts, media=media, content=None if media else content, doc=doc)


def _reply(item: Doc, path: Path) -> Message | None:
    texts = strings(item.get("content"), (*path, "content"), Section.REPLY, _OUTPUT_TEXTS)
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
    if not isinstance(call, str) or not isinstance(output, str | list) or not _accepted(output):
        return None
    return Message(
        role=Role.TOOL,
        path=path,
        texts=strings(output, (*path, "output"), Section.RESULT, _INPUT_TEXTS),
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


def _accepted(content: str | list[Any]) -> bool:
    """Whether the engine accepts the content: a string, or parts of the two kinds that it knows."""
    return isinstance(content, str) or all(_known_part(part) for part in content)


def _known_part(part: Any) -> bool:
    match part:
        case {"type": "input_text", "text": _} | {"type": "input_image", "image_url": _}:
            return True
        case _:
            return False


def _media(content: str | list[Any]) -> tuple[bytes, ...]:
    return tuple(mark(part) for part in rows(content) if part["type"] == _IMAGE)


# -- answers: deltas of items, then all items whole in `response.completed` ------------------------------

_ENDS: Final = frozenset({"response.completed", "response.incomplete"})


@dataclass(slots=True, eq=False)
class ResponsesReading:
    """Reads the deltas; the final response repeats their contents and replaces them."""

    draft: AnswerBuilder

    def event(self, name: str, data: bytes) -> None:
        """Read one event. The `done` events repeat the deltas and are not parsed."""
        if name.endswith(".done"):
            return
        doc = orjson.loads(data)
        kind = doc.get("type", name)
        response = table(doc, "response")
        if kind in {"error", "response.failed"}:
            if not (self.draft.failed(doc) or self.draft.failed(response)):
                self.draft.error = str(doc.get("code") or "error")
        elif kind in _ENDS:
            self.draft.complete = self.draft.error is None
            self.body(response)
            self.draft.timings(doc.get("timings"))
        elif not self.draft.failed(doc):
            self._delta(kind, doc)

    def body(self, doc: Any) -> None:
        """Read a whole response."""
        output = rows(doc.get("output"))
        if output:
            self.draft.reset()
        self.draft.opened = True
        for item in output:
            self._item(item)
        usage = table(doc, "usage")
        cached = table(usage, "input_tokens_details").get("cached_tokens")
        generated = usage.get("output_tokens")
        self.draft.usage(prompt=usage.get("input_tokens"), cached=cached, generated=generated)
        self.draft.timings(doc.get("timings"))

    def _delta(self, kind: str, doc: Doc) -> None:
        self.draft.opened = True
        match kind:
            case "response.output_text.delta":
                self.draft.say(doc.get("delta"))
            case "response.reasoning_text.delta":
                self.draft.think(doc.get("delta"))
            case "response.function_call_arguments.delta":
                self.draft.call(doc.get("item_id"), arguments=doc.get("delta"))
            case "response.output_item.added":
                item = table(doc, "item")
                if item.get("type") == "function_call":
                    self._call(item)
            case _:
                pass

    def _item(self, item: Doc) -> None:
        match item.get("type"):
            case "reasoning":
                for part in rows(item.get("content")):
                    self.draft.think(part.get("text"))
            case "message":
                for part in rows(item.get("content")):
                    self.draft.say(part.get("text"))
            case "function_call":
                self._call(item)
            case _:
                pass

    def _call(self, item: Doc) -> None:
        key = item.get("id") or item.get("call_id")
        self.draft.call(
            key,
            name=item.get("name"),
            call_id=item.get("call_id"),
            arguments=item.get("arguments"),
        )


# -- the chat body that llama-server makes from it, for rendering ----------------------------------------

_OUTPUT_TEXT_TYPES: Final = frozenset({"output_text", "input_text"})


def shape(doc: Doc) -> Shape:
    """Return the chat body that the engine makes from a /v1/responses body. Raises NotOurs."""
    given = doc.get("input")
    lead = [{"role": "system", "content": text(doc, "instructions")}] if "instructions" in doc else []
    messages: list[Doc] = list(lead)
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        for item in given:
            _add(messages, item)
    else:
        raise NotOurs("input")
    chat: Doc = {**pick(doc, HEAD), "messages": messages}
    chat.pop("tools", None)
    if tools := _tools(doc.get("tools")):
        chat["tools"] = tools
    if "effort" in table(doc, "reasoning"):
        chat["reasoning_effort"] = doc["reasoning"]["effort"]
    return Shape(chat=chat, lead=len(lead), media=carries_media(messages))


def _tools(tools: Any) -> list[Doc]:
    """Return the functions among the tools; the engine drops every other kind."""
    converted = []
    for tool in rows(tools):
        if tool.get("type") == "function":
            function = {key: value for key, value in tool.items() if key != "type"}
            function.setdefault("strict", True)
            converted.append({"type": "function", "function": function})
    return converted


def _add(messages: list[Doc], item: Any) -> None:
    """Append `item`, or join it to the assistant message before it. Raises NotOurs."""
    last = messages[-1] if messages and messages[-1].get("role") == "assistant" else None
    match item:
        case {"role": "user" | "system" | "developer", "content": str() | list()}:
            messages.append(_input_message(item))
        case {"role": "assistant", "type": "message"}:
            _add_output(messages, item, last)
        case {"type": "function_call"}:
            _add_call(messages, item, last)
        case {"type": "function_call_output", "call_id": str(call_id)}:
            output = _output(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        case {"type": "reasoning", "summary": list()}:
            _add_reasoning(messages, item, last)
        case _:
            raise NotOurs("input item")


def _input_message(item: Doc) -> Doc:
    content = item["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else [_part(p) for p in content]
    rest = {key: value for key, value in item.items() if key not in {"type", "status"}}
    return {**rest, "content": parts}


def _part(part: Any) -> Doc:
    match part:
        case {"type": "input_text", "text": value}:
            return {"type": "text", "text": value}
        case {"type": "input_image", "image_url": url}:
            return {"type": "image_url", "image_url": {"url": url}}
        case _:
            raise NotOurs("input part")


def _add_output(messages: list[Doc], item: Doc, last: Doc | None) -> None:
    content = item.get("content")
    if isinstance(content, str):
        parts = [{"type": "text", "text": content}]
    else:
        parts = [_output_part(part) for part in content] if isinstance(content, list) else []
    if last is None:
        rest = {key: value for key, value in item.items() if key not in {"type", "status"}}
        messages.append({**rest, "content": parts})
        return
    if not isinstance(last.get("content"), list):
        last["content"] = []
    last["content"] += parts


def _output_part(part: Any) -> Doc:
    match part:
        case {"type": str(kind), "text": str(value)} if kind in _OUTPUT_TEXT_TYPES:
            return {"type": "text", "text": value}
        case {"type": "refusal", "refusal": str(refusal)}:
            return {"type": "refusal", "refusal": refusal}
        case _:
            raise NotOurs("output part")


def _add_call(messages: list[Doc], item: Doc, last: Doc | None) -> None:
    match item:
        case {"call_id": str(call_id), "name": str(name), "arguments": str(arguments)}:
            function = {"name": name, "arguments": arguments}
            call = {"id": call_id, "type": "function", "function": function}
        case _:
            raise NotOurs("function call")
    if last is None:
        messages.append({"role": "assistant", "tool_calls": [call]})
        return
    if not isinstance(last.get("tool_calls"), list):
        last["tool_calls"] = []
    last["tool_calls"].append(call)


def _output(output: Any) -> str | list[Doc]:
    if isinstance(output, str):
        return output
    if not isinstance(output, list):
        raise NotOurs("tool output")
    return [_part(part) for part in output]


def _add_reasoning(messages: list[Doc], item: Doc, last: Doc | None) -> None:
    match item.get("content"):
        case [{"text": str(thought)}, *_]:
            if last is None:
                messages.append({"role": "assistant", "content": [], "reasoning_content": thought})
            else:
                last["reasoning_content"] = thought
        case _:
            raise NotOurs("reasoning")
