import pytest

from slotkeeper.api.document import NotOurs
from slotkeeper.api.formats.anthropic import shape
from slotkeeper.conversation.rules.rules import without_stamp

HEADER = "x-anthropic-billing-header: cc_version=2.1; cch="


def chat(*messages, **body):
    return shape({"messages": list(messages), **body}).chat


def blocks(role, *content):
    return {"role": role, "content": list(content)}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (HEADER + "a51f5;You", HEADER + "fffff;You"),
        (HEADER + "a51f5;", HEADER + "fffff;"),
        (HEADER + "a51f;You", HEADER + "a51f;You"),
        (HEADER + "a51f5", HEADER + "a51f5"),
        ("x-anthropic-billing-header: none", "x-anthropic-billing-header: none"),
        ("cch=a51f5; " + HEADER + "a51f5;", "cch=a51f5; " + HEADER + "a51f5;"),
    ],
)
def test_only_a_stamp_in_a_leading_billing_header_is_replaced(before, after):
    assert without_stamp(before) == after


def test_system_blocks_are_joined_and_their_billing_stamp_is_replaced():
    system = [
        {"type": "text", "text": HEADER + "12345;"},
        {"type": "x"},
        {"type": "text", "text": " Two."},
        7,
    ]
    assert chat(system=system)["messages"] == [{"role": "system", "content": HEADER + "fffff; Two."}]
    assert chat(system=None)["messages"] == []
    assert chat(system="")["messages"] == [{"role": "system", "content": ""}]


NUMBERS = [1, 1e-05, 1e22, 1234567890123456.5, "1000000000000000.0", None]
WRITTEN = '[1,1e-05,1e+22,1.2345678901234565e+15,"1000000000000000.0",null]'


def test_tool_use_becomes_calls_with_compact_arguments_in_their_own_order():
    use = {"type": "tool_use", "id": "t", "name": "ls", "input": {"z": "é\n", "a": NUMBERS}}
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    (said,) = chat(blocks("assistant", thought, use, {"type": "tool_use"}))["messages"]
    assert said["content"] == ""
    assert said["reasoning_content"] == "hm"
    assert said["tool_calls"] == [
        {
            "id": "t",
            "type": "function",
            "function": {"name": "ls", "arguments": f'{{"z":"é\\n","a":{WRITTEN}}}'},
        },
        {"id": "", "type": "function", "function": {"name": "", "arguments": "{}"}},
    ]


def test_tool_results_follow_the_text_of_their_message():
    text = {"type": "text", "text": "go"}
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": "x"},
        {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "y"}] * 2},
        {"type": "tool_result", "tool_use_id": "c"},
    ]
    messages = chat(blocks("user", *results, text))["messages"]
    assert [(m["role"], m["content"]) for m in messages] == [
        ("user", [text]),
        ("tool", "x"),
        ("tool", "yy"),
        ("tool", ""),
    ]
    assert chat(blocks("user", results[0]))["messages"][0]["role"] == "tool"


def test_content_that_is_not_blocks_is_kept_and_empty_messages_are_dropped():
    passing = [{"role": "user", "content": "a"}, {"role": "user", "content": 5}, {"role": "user"}]
    skipped = [{"role": "assistant"}, blocks("assistant", {"type": "redacted_thinking"}), blocks("user")]
    assert chat(*passing, *skipped)["messages"] == passing
    assert shape({"messages": "x"}).chat == {"messages": []}


def test_tools_and_their_choice_are_converted():
    got = chat(tools=[{"name": "ls", "input_schema": {"type": "object"}, "cache_control": 1}, {"name": 7}])
    assert got["tools"] == [
        {
            "type": "function",
            "function": {"name": "ls", "description": "", "parameters": {"type": "object"}},
        },
        {"type": "function", "function": {"name": "", "description": "", "parameters": {}}},
    ]
    choices = ({"type": kind} for kind in ("auto", "any", "tool", "none"))
    assert [chat(tool_choice=choice).get("tool_choice") for choice in choices] == [
        "auto",
        "required",
        "required",
        None,
    ]
    assert chat(tools="x", tool_choice="any", thinking={"type": "disabled"}) == {"messages": []}


@pytest.mark.parametrize(
    ("source", "url"),
    [
        ({"type": "base64", "data": "aGk="}, "data:image/jpeg;base64,aGk="),
        ({"type": "base64", "media_type": "image/png", "data": "aGk="}, "data:image/png;base64,aGk="),
        ({"type": "url", "url": "http://x/y"}, "http://x/y"),
    ],
)
def test_images_are_media_in_messages_and_in_tool_results(source, url):
    image, text = {"type": "image", "source": source}, {"type": "text", "text": "see"}
    part = {"type": "image_url", "image_url": {"url": url}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text, image]}
    for content, parts in (([image, {"type": "image"}], [part]), ([result], [text, part])):
        shown = shape({"messages": [blocks("user", *content)]})
        assert shown.media
        assert shown.chat["messages"][0]["content"] == parts


def test_messages_must_be_a_list_of_objects():
    for body in ({}, {"messages": ["x"]}):
        with pytest.raises(NotOurs):
            shape(body)
