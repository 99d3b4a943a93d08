"""The parts of bodies of the three APIs that reach the prompt, and their paths."""

import copy
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slotkeeper.api.document import NotOurs
from slotkeeper.api.head import Api
from slotkeeper.api.request import lay_out, parse
from slotkeeper.conversation.layout import Edit, Role, Section, edited

SYSTEM, TASK, THOUGHT, LOOK = "You help.\nToday's date: 2026-11-21", "fix it", "first I look", "I look."
RESULT, DONE, ARGUMENTS = "a.py", "Done.", '{"path":"."}'

CHAT = {
    "model": "m",
    "tools": [{"type": "function", "function": {"name": "ls", "parameters": {}}}],
    "messages": [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": [{"type": "text", "text": TASK}]},
        {
            "role": "assistant",
            "content": LOOK,
            "reasoning_content": THOUGHT,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": ARGUMENTS}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": RESULT},
        {"role": "assistant", "content": DONE},
    ],
}
MESSAGES = {
    "model": "m",
    "system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}],
    "tools": [{"name": "ls", "input_schema": {}}],
    "messages": [
        {"role": "user", "content": TASK},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": THOUGHT, "signature": ""},
                {"type": "text", "text": LOOK},
                {"type": "tool_use", "id": "c1", "name": "ls", "input": {"path": "."}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": RESULT}]},
        {"role": "assistant", "content": [{"type": "text", "text": DONE}]},
    ],
}
RESPONSES = {
    "model": "m",
    "instructions": SYSTEM,
    "tools": [{"type": "function", "name": "ls", "parameters": {}}],
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": TASK}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": THOUGHT}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": LOOK}]},
        {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": ARGUMENTS},
        {"type": "function_call_output", "call_id": "c1", "output": RESULT},
        {"type": "message", "role": "assistant", "content": DONE},
    ],
}
BODIES = [(Api.CHAT, CHAT), (Api.MESSAGES, MESSAGES), (Api.RESPONSES, RESPONSES)]


def at(value, path):
    for key in path:
        value = value[key]
    return value


def leaves(value, path=()):
    """Yield each path to a value that is no object or list, or an empty one, and that value."""
    if not isinstance(value, dict | list) or not value:
        return {path: value}
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    return {place: leaf for key, part in inner for place, leaf in leaves(part, (*path, key)).items()}


def everything(layout):
    for message in layout.messages:
        yield from message.texts
        yield from message.answers
        if message.reasoning:
            yield message.reasoning


def spoken(layout):
    """Return speaker and text of each section; APIs differ in how they divide calls into messages."""
    for message in layout.messages:
        for text in message.pieces():
            yield message.role, text.section, text.text
        for call in message.calls:
            arguments = call.arguments
            value = orjson.loads(arguments) if isinstance(arguments, str) else arguments
            yield message.role, Section.CALL, (call.id, call.name, value)


@pytest.mark.parametrize(("api", "body"), BODIES)
def test_a_conversation_has_the_same_layout_in_every_api(api, body):
    layout = lay_out(api, body)
    assert list(spoken(layout)) == [
        (Role.SYSTEM, Section.SYSTEM, SYSTEM),
        (Role.USER, Section.USER, TASK),
        (Role.ASSISTANT, Section.REASONING, THOUGHT),
        (Role.ASSISTANT, Section.REPLY, LOOK),
        (Role.ASSISTANT, Section.CALL, ("c1", "ls", {"path": "."})),
        (Role.TOOL, Section.RESULT, RESULT),
        (Role.ASSISTANT, Section.REPLY, DONE),
    ]
    assert [text.text for message in layout.messages for text in message.answers] == ["c1"]
    assert (layout.lead, layout.newest_user) == (1, 1)
    assert layout.tools == tuple(body["tools"])


@pytest.mark.parametrize(("api", "body"), BODIES)
def test_calls_and_messages_have_paths(api, body):
    layout = lay_out(api, body)
    assert at(body, layout.tools_path) == list(layout.tools)
    for message in layout.messages:
        at(body, message.path)
        for call in message.calls:
            assert at(body, call.id_path) == call.id
            assert at(body, call.arguments_path) == call.arguments


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
    max_leaves=3,
)
WORDS = st.text(max_size=4)
PARTS = st.fixed_dictionaries(
    {
        "type": st.sampled_from(
            ["text", "refusal", "thinking", "input_text", "output_text", "image", "image_url", "input_image"]
        )
    },
    optional={
        "text": WORDS | JUNK,
        "thinking": WORDS,
        "refusal": WORDS,
        "image_url": WORDS,
        "source": JUNK,
        "cache_control": JUNK,
    },
)
CONTENT = WORDS | st.none() | JUNK | st.lists(PARTS | JUNK, max_size=3)
BLOCKS = st.lists(
    PARTS
    | JUNK
    | st.fixed_dictionaries(
        {"type": st.just("tool_use")}, optional={"id": WORDS, "name": WORDS, "input": JUNK}
    )
    | st.fixed_dictionaries(
        {"type": st.just("tool_result")}, optional={"tool_use_id": WORDS, "content": CONTENT}
    ),
    max_size=3,
)
FUNCTION = st.fixed_dictionaries({}, optional={"name": WORDS, "arguments": WORDS | JUNK})
SAID = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "function", "x"])},
    optional={
        "content": CONTENT | BLOCKS,
        "reasoning_content": WORDS | JUNK,
        "reasoning": WORDS | JUNK,
        "tool_call_id": WORDS | JUNK,
        "tool_calls": st.lists(
            st.fixed_dictionaries({}, optional={"id": WORDS, "function": FUNCTION | JUNK}) | JUNK, max_size=2
        )
        | JUNK,
    },
)
ITEMS = (
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": CONTENT},
        optional={"type": st.just("message")},
    )
    | st.fixed_dictionaries(
        {"type": st.sampled_from(["function_call", "function_call_output", "reasoning"])},
        optional={
            "call_id": WORDS,
            "name": WORDS,
            "arguments": WORDS,
            "output": CONTENT,
            "summary": st.just([]),
            "content": st.lists(PARTS, max_size=2),
        },
    )
    | JUNK
)
BODY = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.lists(SAID, max_size=4) | JUNK,
        "input": st.lists(ITEMS, max_size=3) | WORDS | JUNK,
        **{
            key: JUNK | st.lists(WORDS | JUNK, max_size=3)
            for key in ("prompt", "n", "stream", "model", "metadata")
        },
        "system": CONTENT,
        "instructions": WORDS | JUNK,
        "reasoning": JUNK,
        "tools": st.lists(st.fixed_dictionaries({"name": WORDS}), max_size=2),
    },
)


@given(api=st.sampled_from([Api.CHAT, Api.MESSAGES, Api.RESPONSES]), body=BODY, new=WORDS)
def test_the_path_of_each_text_is_right_and_an_edit_there_changes_nothing_else(api, body, new):
    as_given = copy.deepcopy(body)
    layout = lay_out(api, body)
    for text in everything(layout) if layout else ():
        changed = edited(body, [Edit(text.path, text.text, new)])
        was, now = leaves(body), leaves(changed)
        assert (was.get(text.path) or "") == text.text  # null is no text
        assert now == {**was, text.path: new}
    assert body == as_given


UNTYPED = {"type": [], "text": "x"}  # a type that is no string


@given(api=st.sampled_from(list(dict(BODIES))) | st.sampled_from(list(Api)), body=BODY)
@example(api=Api.CHAT, body={"messages": [{"role": "user", "content": [UNTYPED]}]})
@example(api=Api.RESPONSES, body={"input": [{"role": [], "content": "x"}]})
@example(api=Api.RESPONSES, body={"input": [{"role": "assistant", "type": "message", "content": [UNTYPED]}]})
def test_any_body_is_parsed_and_laid_out_or_both_are_left_to_the_engine(api, body):
    try:
        parse(api, orjson.dumps(body))
        readable = True
    except NotOurs:
        readable = False
    assert (lay_out(api, body) is not None) is (readable and api in dict(BODIES))


@pytest.mark.parametrize(
    ("api", "reply", "key"),
    [
        (Api.CHAT, {"content": "a"}, "reasoning_content"),
        (Api.CHAT, {"content": "a", "reasoning": "so"}, "reasoning"),  # the name that the client uses
        (Api.MESSAGES, {"content": [{"type": "text", "text": "a"}]}, None),
    ],
)
def test_absent_reasoning_has_a_path_in_a_chat_body(api, reply, key):
    body = {"messages": [{"role": "assistant", **reply}, {"role": "user", "content": "b"}]}
    said, asked = lay_out(api, body).messages
    assert asked.reasoning is None
    found = said.reasoning and (said.reasoning.path, said.reasoning.text)
    assert found == (key and (("messages", 0, key), reply.get(key, "")))


def test_a_reminder_beside_tool_results_is_user_text_in_a_tool_message():
    blocks = [
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "a.py"}]},
        {"type": "text", "text": "<system-reminder>\nBe brief.\n</system-reminder>"},
    ]
    (message,) = lay_out(Api.MESSAGES, {"messages": [{"role": "user", "content": blocks}]}).messages
    assert message.role is Role.TOOL
    assert [text.section for text in message.texts] == [Section.RESULT, Section.USER]
    assert message.texts[0].path == ("messages", 0, "content", 0, "content", 0, "text")


def shown(api, url):
    """Return a request with an image."""
    part = {
        Api.CHAT: {"type": "image_url", "image_url": url},
        Api.MESSAGES: {"type": "image", "source": {"url": url}},
        Api.RESPONSES: {"type": "input_image", "image_url": url},
    }[api]
    return {"input" if api is Api.RESPONSES else "messages": [{"role": "user", "content": [part]}]}


@pytest.mark.parametrize("api", dict(BODIES))
def test_media_have_no_text_but_distinguish_messages(api):
    (one,), (two,), (again,) = (
        lay_out(api, shown(api, url)).messages for url in ("data:1", "data:2", "data:1")
    )
    assert one.texts == two.texts == ()
    assert one.media == again.media != two.media


def nested(depth: int) -> Any:
    return "x" if depth == 0 else [nested(depth - 1)]


@pytest.mark.parametrize(
    ("api", "body"),
    [
        *((api, CHAT) for api in Api if api not in dict(BODIES)),
        *((api, {**body, "tools": [{}, 7]}) for api, body in BODIES),
        (Api.CHAT, shown(Api.CHAT, nested(300))),
    ],
)
def test_another_route_and_an_unreadable_body_have_no_layout(api, body):
    assert lay_out(api, body) is None


@pytest.mark.parametrize(
    ("api", "fields", "options"),
    [
        (Api.CHAT, {"tool_choice": "auto", "temperature": 0, "reasoning_effort": None}, {}),
        (Api.CHAT, {"tool_choice": "none"}, {"tool_choice": "none"}),
        (Api.CHAT, {"grammar": "root ::= x", "parallel_tool_calls": True, "model": "n"}, {}),
        (Api.CHAT, {"enable_thinking": False}, {"enable_thinking": False}),
        (Api.RESPONSES, {"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
        (Api.RESPONSES, {"reasoning": {"summary": "auto"}, "text": {"format": {"type": "text"}}}, {}),
        (Api.MESSAGES, {"thinking": {"type": "enabled"}, "tool_choice": {"type": "auto"}}, {}),
        (Api.MESSAGES, {"chat_template_kwargs": {"a": 1}}, {"chat_template_kwargs": {"a": 1}}),
    ],
)
def test_options_are_the_fields_that_reach_the_template(api, fields, options):
    assert lay_out(api, {**dict(BODIES)[api], **fields}).options == options
