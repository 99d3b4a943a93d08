"""Tool lists: schemas that mistral-vibe rewrites on resume, and orders that tool servers change."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slotkeeper.api.head import Api
from slotkeeper.conversation.rules.rules import SchemaKeys, ToolOrder
from unit.conversation.rules.scenes import apply_rule

Doc = dict[str, Any]

ITEM_AT_FIRST: Doc = {
    "properties": {
        "id": {"description": "Names the step", "title": "Id", "type": "string"},
        "content": {"description": "What to do", "title": "Content", "type": "string"},
        "status": {"$ref": "#/$defs/Status", "default": "open"},
    },
    "required": ["id", "content"],
    "title": "Item",
    "type": "object",
}
PROPERTIES = ITEM_AT_FIRST["properties"]
ITEM_RESUMED = {
    **ITEM_AT_FIRST,
    "properties": {name: PROPERTIES[name] for name in ("content", "id", "status")},
    "required": ["content", "id"],
}


def chat_tool(name: str, parameters: Any = None) -> Doc:
    given = parameters or {"type": "object", "properties": {"path": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": given}}


def todo(item: Doc) -> Doc:
    status = {"enum": ["open", "done"], "title": "Status", "type": "string"}
    items = {"anyOf": [{"items": {"$ref": "#/$defs/Item"}, "type": "array"}, {"type": "null"}]}
    return chat_tool("todo", {"$defs": {"Item": item, "Status": status}, "properties": {"todos": items}})


def chat(*tools: Doc) -> Doc:
    messages = [{"role": "system", "content": "You are Vibe."}, {"role": "user", "content": "Fix it."}]
    return {"model": "m", "messages": messages, "tools": [*tools], "stream": True}


def names(doc: Doc) -> list[str]:
    return [tool.get("function", tool).get("name") or tool["type"] for tool in doc["tools"]]


def test_a_resumed_schema_is_restored_as_it_was_first_sent():
    first = chat(chat_tool("bash"), todo(ITEM_AT_FIRST), chat_tool("edit"))
    resumed = chat(chat_tool("bash"), todo(ITEM_RESUMED), chat_tool("edit"))
    assert json.dumps(resumed) != json.dumps(first)
    assert json.dumps(apply_rule(SchemaKeys(), resumed, first)) == json.dumps(first)


@pytest.mark.parametrize(
    "change",
    [
        {"title": "Entry"},
        {"required": ["content"]},
        {"required": ["content", "id", "status"]},
        {"additionalProperties": False},
        {"minProperties": True},
    ],
)
def test_a_schema_with_another_meaning_is_sent_unchanged(change):
    first = chat(todo({**ITEM_AT_FIRST, "minProperties": 1}))
    resumed = chat(todo({**ITEM_RESUMED, "minProperties": 1, **change}))
    assert apply_rule(SchemaKeys(), resumed, first) is resumed


def test_a_list_inside_a_default_value_keeps_its_order():
    first = chat(chat_tool("ask", {"default": {"required": ["b", "a"]}, "type": "object"}))
    now = chat(chat_tool("ask", {"type": "object", "default": {"required": ["a", "b"]}}))
    assert apply_rule(SchemaKeys(), now, first) is now


@pytest.mark.parametrize("rule", [SchemaKeys(), ToolOrder()])
def test_without_an_earlier_request_the_tools_are_not_edited(rule):
    now = chat(todo(ITEM_RESUMED), chat_tool("bash"))
    assert apply_rule(rule, now) is now


@pytest.mark.parametrize(
    ("first", "now", "expected"),
    [
        ("abc", "cab", "abc"),
        ("abc", "cxaby", "abcxy"),  # new tools are appended
        ("abc", "ca", "ac"),  # removed tools stay removed
        ("ac", "cba", "acb"),  # a tool that returns counts as new
        ("", "ba", "ba"),
        ("ab", "xy", "xy"),
        ("aba", "baa", "aba"),  # two tools with the same name
        ("abc", "abc", "abc"),
        ("aba", "aba", "aba"),
        ("abc", "", ""),
        ("abc", "abcd", "abcd"),
    ],
)
def test_tools_keep_the_order_in_which_they_were_first_sent(first, now, expected):
    sent, came = (chat(*map(chat_tool, order)) for order in (first, now))
    after = apply_rule(ToolOrder(), came, sent)
    assert "".join(names(after)) == expected
    assert (after is came) == (now == expected)


def test_tools_that_the_server_runs_are_distinguished_by_type():
    shell = {"type": "function", "name": "exec_command", "parameters": {"type": "object"}, "strict": False}
    search, mcp = {"type": "web_search"}, {"type": "mcp", "server_label": "docs", "server_url": "http://x"}
    first, now = (
        {"input": "Look.", "tools": list(tools)} for tools in ([shell, search, mcp], [mcp, search, shell])
    )
    after = apply_rule(ToolOrder(), now, first, api=Api.RESPONSES)
    assert after["tools"] == [shell, search, mcp]


def test_both_rules_together_restore_the_first_tool_list_of_an_anthropic_client():
    def tool(name: str, *, turned: bool) -> Doc:
        schema: Doc = {"type": "object", "properties": {"file_path": {"type": "string"}}}
        return {
            "name": name,
            "description": "Does it.",
            "input_schema": dict(reversed(schema.items())) if turned else schema,
        }

    said = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Look."}]}
    first = {**said, "tools": [tool("Read", turned=False), tool("Bash", turned=False)]}
    now = {**said, "tools": [tool("Bash", turned=True), tool("Read", turned=True)]}
    after = apply_rule(ToolOrder(), now, first, api=Api.MESSAGES)
    after = apply_rule(SchemaKeys(), after, first, api=Api.MESSAGES)
    assert json.dumps(after) == json.dumps(first)
