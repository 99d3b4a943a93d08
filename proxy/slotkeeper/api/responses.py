"""OpenAI Responses bodies as the chat body that llama-server turns them into, for rendering only.

Mirrors the engine's own converter (engine.md 1.2). It refuses what it does not know with a 400, and then
so do we: such a request goes through as it came.
"""

from __future__ import annotations

from typing import Any, Final

from slotkeeper.api.document import Doc, NotOurs, Shape, pick, rows, table, text
from slotkeeper.api.openai import HEAD, carries_media

_ASKING: Final = frozenset({"user", "system", "developer"})
_SAID: Final = frozenset({"output_text", "input_text"})


def shape(doc: Doc) -> Shape:
    """A /v1/responses body."""
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
    """The functions among the tools; the engine leaves every other kind out."""
    converted = []
    for tool in rows(tools):
        if tool.get("type") == "function":
            function = {key: value for key, value in tool.items() if key != "type"}
            function.setdefault("strict", True)
            converted.append({"type": "function", "function": function})
    return converted


def _add(messages: list[Doc], item: Any) -> None:
    """Append `item`, or join it to the assistant message that it belongs to."""
    if not isinstance(item, dict):
        raise NotOurs("input item")
    last = messages[-1] if messages and messages[-1].get("role") == "assistant" else None
    kind, content = item.get("type"), item.get("content")
    if isinstance(content, str | list) and text(item, "role") in _ASKING:
        messages.append(_input_message(item))
    elif item.get("role") == "assistant" and kind == "message":
        _add_output(messages, item, last)
    elif kind == "function_call":
        _add_call(messages, item, last)
    elif kind == "function_call_output" and isinstance(item.get("call_id"), str):
        output = _output(item.get("output"))
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
    elif kind == "reasoning" and isinstance(item.get("summary"), list):
        _add_reasoning(messages, item, last)
    else:
        raise NotOurs("input item")


def _input_message(item: Doc) -> Doc:
    content = item["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else [_part(p) for p in content]
    rest = {key: value for key, value in item.items() if key not in {"type", "status"}}
    return {**rest, "content": parts}


def _part(part: Any) -> Doc:
    match part:
        case {"type": "input_text", "text": said}:
            return {"type": "text", "text": said}
        case {"type": "input_image", "image_url": url}:
            return {"type": "image_url", "image_url": {"url": url}}
        case _:
            raise NotOurs("input part")


def _add_output(messages: list[Doc], item: Doc, last: Doc | None) -> None:
    content = item.get("content")
    if isinstance(content, str):
        parts = [{"type": "text", "text": content}]
    else:
        parts = [_said(part) for part in content] if isinstance(content, list) else []
    if last is None:
        rest = {key: value for key, value in item.items() if key not in {"type", "status"}}
        messages.append({**rest, "content": parts})
        return
    if not isinstance(last.get("content"), list):
        last["content"] = []
    last["content"] += parts


def _said(part: Any) -> Doc:
    match part:
        case {"type": str(kind), "text": str(said)} if kind in _SAID:
            return {"type": "text", "text": said}
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
