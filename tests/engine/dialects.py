"""One turn of a scripted session, as a client of each API sends it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from slotkeeper.api.head import Api
from slotkeeper.bench.target import Turn

Doc = dict[str, Any]

PATHS: Final = MappingProxyType(
    {
        Api.CHAT: "/v1/chat/completions",
        Api.MESSAGES: "/v1/messages",
        Api.RESPONSES: "/v1/responses",
    }
)


def as_messages(turn: Turn) -> Doc:
    system, *messages = turn.messages
    body = {
        "system": system["content"],
        "messages": [_spoken(message) for message in messages],
        "max_tokens": turn.max_tokens,
        "temperature": 0,
        **_head(turn),
    }
    if "tools" in turn.fields:
        body["tools"] = [_tool(tool["function"], "input_schema") for tool in turn.fields["tools"]]
    if "tool_choice" in turn.fields:
        body["tool_choice"] = {"type": "any"}
    return body


def _spoken(message: Doc) -> Doc:
    if message["role"] == "tool":
        result = {"tool_use_id": message["tool_call_id"], "content": message["content"]}
        return {"role": "user", "content": [{"type": "tool_result", **result}]}
    if message["role"] == "user":
        return message
    blocks: list[Doc] = []
    if thought := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        given = json.loads(call["function"]["arguments"])
        blocks.append(
            {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given}
        )
    return {"role": "assistant", "content": blocks}


def as_responses(turn: Turn) -> Doc:
    system, *messages = turn.messages
    body = {
        "instructions": system["content"],
        "input": [item for message in messages for item in _items(message)],
        "max_output_tokens": turn.max_tokens,
        "temperature": 0,
        **_head(turn),
    }
    if "tools" in turn.fields:
        body["tools"] = [
            {"type": "function", **_tool(tool["function"], "parameters")} for tool in turn.fields["tools"]
        ]
    if "tool_choice" in turn.fields:
        body["tool_choice"] = turn.fields["tool_choice"]
    return body


def _items(message: Doc) -> Iterator[Doc]:
    said = message["content"]
    if message["role"] == "user":
        yield {"role": "user", "content": [{"type": "input_text", "text": said}]}
        return
    if message["role"] == "tool":
        yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": said}
        return
    if thought := message.get("reasoning_content"):
        yield {
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": thought}],
        }
    if said:
        yield {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": said}]}
    for call in message.get("tool_calls", ()):
        yield {"type": "function_call", "call_id": call["id"], **call["function"]}


def _tool(function: Doc, schema: str) -> Doc:
    name, description = function["name"], function["description"]
    return {"name": name, "description": description, schema: function["parameters"]}


def _head(turn: Turn) -> Doc:
    return {key: value for key, value in turn.fields.items() if key == "chat_template_kwargs"}


BODIES: Final[Mapping[Api, Callable[[Turn], Doc]]] = MappingProxyType(
    {Api.CHAT: Turn.body, Api.MESSAGES: as_messages, Api.RESPONSES: as_responses}
)
