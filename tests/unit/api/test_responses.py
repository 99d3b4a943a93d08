import pytest

from slotkeeper.api.document import NotOurs
from slotkeeper.api.formats.responses import shape

CALL = {"type": "function_call", "call_id": "c", "name": "ls", "arguments": '{"a": 1}'}
CALLED = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": '{"a": 1}'}}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


def text(said):
    return {"type": "text", "text": said}


def said(*parts):
    return {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": list(parts)}


def messages(*items):
    return shape({"input": list(items)}).chat["messages"]


LOOK = {"type": "output_text", "text": "Look."}
NO = {"type": "refusal", "refusal": "no"}
OUTPUT = {"type": "function_call_output", "call_id": "c"}
RULES = {"type": "message", "role": "developer", "status": "x", "content": "rules"}
ANSWER = {"role": "tool", "tool_call_id": "c"}
ASSISTANT = {"role": "assistant"}
MERGED = {"content": [text("Look."), text("Now.")], "reasoning_content": "hm", "tool_calls": [CALLED, CALLED]}


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([THOUGHT, said(LOOK), {**said(), "content": "Now."}, CALL, CALL], [{**ASSISTANT, **MERGED}]),
        ([CALL], [{**ASSISTANT, "tool_calls": [CALLED]}]),
        ([CALL, said()], [{**ASSISTANT, "tool_calls": [CALLED], "content": []}]),
        ([said(NO), THOUGHT], [{**ASSISTANT, "id": "m", "content": [NO], "reasoning_content": "hm"}]),
        ([{**OUTPUT, "output": "a"}], [{**ANSWER, "content": "a"}]),
        ([{**OUTPUT, "output": [{"type": "input_text", "text": "a"}]}], [{**ANSWER, "content": [text("a")]}]),
        ([RULES], [{"role": "developer", "content": [text("rules")]}]),
    ],
)
def test_consecutive_items_of_one_role_are_one_message(items, expected):
    assert messages(*items) == expected


def test_instructions_are_a_system_message_and_images_are_media():
    image = {"type": "input_image", "image_url": "data:,"}
    got = shape({"input": [{"role": "user", "content": [image]}], "instructions": "Be brief."})
    assert (got.lead, got.media) == (1, True)
    assert got.chat["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]},
    ]


def test_only_functions_are_tools_and_they_are_strict_by_default():
    tools = [{"type": "function", "name": "a"}, {"type": "web_search"}, {"type": "function", "strict": False}]
    assert shape({"input": "x", "tools": tools}).chat["tools"] == [
        {"type": "function", "function": {"name": "a", "strict": True}},
        {"type": "function", "function": {"strict": False}},
    ]
    assert "tools" not in shape({"input": "x", "tools": tools[1:2]}).chat


def test_the_reasoning_effort_becomes_the_chat_field():
    got = shape({"input": "x", "reasoning": {"effort": "low"}, "tool_choice": "auto", "temperature": 1})
    assert got.chat == {
        "messages": [{"role": "user", "content": "x"}],
        "tool_choice": "auto",
        "reasoning_effort": "low",
    }


@pytest.mark.parametrize(
    "item",
    [
        "x",
        {},
        {"type": "item_reference", "id": "m"},
        {"type": "web_search_call"},
        {"role": "user", "content": [{"type": "input_file"}]},
        {"role": "user", "content": [{"type": "input_text"}]},
        {"role": "user", "content": ["x"]},
        {"role": "assistant", "content": "no type"},
        said({"type": "output_text", "text": 7}),
        {"type": "function_call", "call_id": "c", "name": "ls"},
        {"type": "function_call_output", "call_id": "c", "output": 7},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "output_text"}]},
        {"type": "reasoning", "summary": [], "content": []},
        {"type": "reasoning", "summary": []},
    ],
)
def test_an_item_that_the_engine_refuses_is_left_to_the_engine(item):
    with pytest.raises(NotOurs):
        messages(item)
