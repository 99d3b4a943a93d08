"""Messages are recognised although their client rewrote them, and different ones are not confused."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotkeeper.api.head import Api
from slotkeeper.api.request import lay_out
from slotkeeper.conversation.layout import Role, digest, same
from slotkeeper.conversation.rules.rules import common

NOTE = "<system-reminder>\nThe current date is: Saturday, November 21, 2026.\n</system-reminder>"
OTHER_NOTE = "<system-reminder>\nThe current date is: Sunday, November 22, 2026.\n</system-reminder>"
EMPTY_NOTE = "<system-reminder>\n</system-reminder>"
PNG, JPEG = ({"type": "image_url", "image_url": {"url": f"data:image/{kind}"}} for kind in ("png", "jpeg"))


def laid_out(*messages, api=Api.CHAT):
    return lay_out(api, {"messages": list(messages)})


def user(content):
    return {"role": "user", "content": content}


def block(text, **more):
    return {"type": "text", "text": text, **more}


def reply(arguments, call="c1", name="ls", **more):
    calls = [{"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}]
    return {"role": "assistant", "content": None, "tool_calls": calls, **more}


ALIKE = [
    (user("fix it"), user("fix it\n")),
    (user("fix it"), user([block("fix it", cache_control={"type": "ephemeral"})])),
    (user("fix it\nnow"), user([block("fix it"), block("now")])),
    (user("fix it"), user([block(NOTE), block("fix it")])),
    (user([block(NOTE), block("fix it")]), user([block("fix it"), block(OTHER_NOTE)])),
    (user(f"fix it\n\n{NOTE}"), user(f"fix it\n\n{OTHER_NOTE}")),
    (user(f"fix it\n\n{NOTE}\n\nnow"), user("fix it\n\nnow")),
    (user([block(EMPTY_NOTE), block("fix it")]), user("fix it")),
    (user(NOTE), user(OTHER_NOTE)),
    (user(NOTE), user("")),
    (
        {"role": "system", "content": "You help.\nCurrent date: 2026-11-21"},
        {"role": "developer", "content": "You help.\nCurrent date: 2026-11-22"},
    ),
    (reply('{"a":1,"b":{"c":2,"d":3}}'), reply('{ "b": {"d": 3.0, "c": 2}, "a": 1 }', call="c9")),
    (reply("{}"), reply("")),
    (reply({"a": 1}), reply('{"a":1}')),
    (reply("{}", reasoning_content="so"), reply("{}")),
    (reply('{"a":1'), reply('{"a":1 ')),
    (
        {"role": "tool", "tool_call_id": "c1", "content": "a.py"},
        {"role": "tool", "tool_call_id": "c9", "content": "a.py\n"},
    ),
]
APART = [
    (user("fix it"), user("fix that")),
    (user("fix it"), {"role": "assistant", "content": "fix it"}),
    (user("a\n  b"), user("a\nb")),
    (user("Today's date: 2026-11-21"), user("Today's date: 2026-11-22")),  # a person wrote it
    (user([block("look"), PNG]), user([block("look"), JPEG])),
    (user([block("look"), PNG]), user("look")),
    (reply('{"a":1}'), reply('{"a":true}')),
    (reply({"a": 1}), reply({"a": True})),
    (reply('{"a":1}'), reply('{"a":"1"}')),
    (reply("{}"), reply("{}", name="cat")),
    (reply('{"a":1'), reply('{"a":2')),
    (reply("{}"), {"role": "assistant", "content": None}),
    ({"role": "assistant", "content": NOTE}, {"role": "assistant", "content": ""}),
    (
        {"role": "tool", "tool_call_id": "c1", "content": "Current date: 2026-11-21"},
        {"role": "tool", "tool_call_id": "c1", "content": "Current date: 2026-11-22"},
    ),
]


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_messages_that_differ_only_in_what_clients_rewrite_are_the_same(one, other):
    a, b = laid_out(one).messages[0], laid_out(other).messages[0]
    assert same(a, b)
    assert same(b, a)
    assert digest(a) == digest(b)


@pytest.mark.parametrize(("one", "other"), APART)
def test_messages_with_different_roles_or_content_are_not_the_same(one, other):
    a, b = laid_out(one).messages[0], laid_out(other).messages[0]
    assert not same(a, b)
    assert digest(a) != digest(b)


def test_thinking_blocks_and_cache_marks_do_not_distinguish_anthropic_messages():
    call = {"type": "tool_use", "id": "c1", "name": "ls", "input": {"a": 1}}
    thought = {"type": "thinking", "thinking": "so"}
    marked = {**call, "id": "c9", "cache_control": {"type": "ephemeral"}}
    one, other = (
        laid_out({"role": "assistant", "content": content}, api=Api.MESSAGES).messages[0]
        for content in ([thought, thought, call], [marked])
    )
    assert same(one, other)
    assert digest(one) == digest(other)


def test_a_message_with_too_deeply_nested_arguments_equals_only_itself():
    deep: Any = "x"
    deeper: Any = ["x"]
    for _ in range(600):
        deep, deeper = [deep], [deeper]
    one, other = laid_out(reply({"a": deep})).messages[0], laid_out(reply({"a": deeper})).messages[0]
    assert not same(one, other)
    assert same(one, one)
    assert digest(one) == digest(one)


HEAD = {"role": "system", "content": "You help.\nCurrent date: 2026-11-21"}


@pytest.mark.parametrize(
    ("old", "new", "count"),
    [
        ([user("a"), reply("{}")], [user("a"), reply("{}"), user("b")], 2),
        ([user("a"), reply("{}"), user("b")], [user("a")], 1),
        ([user("a"), user("b"), user("c")], [user("a"), user("x"), user("c")], 1),
        ([user("a"), user(NOTE), user("b")], [user("a"), user("b")], 1),  # nothing is skipped
        ([], [user("a")], 0),
    ],
)
def test_common_messages_are_counted_from_the_first_message_after_the_system_text(old, new, count):
    assert common(laid_out(HEAD, *old), laid_out(*new)) == count


TURNS = st.lists(
    st.sampled_from([one for one, _ in ALIKE] + [other for _, other in ALIKE + APART]).filter(
        lambda message: message["role"] not in {"system", "developer"}
    ),
    max_size=4,
)


@given(old=TURNS, new=TURNS)
def test_common_messages_are_those_with_equal_digests(old, new):
    one, other = laid_out(*old), laid_out(*new)
    count = common(one, other)
    a, b = ([digest(message) for message in layout.messages] for layout in (one, other))
    assert a[:count] == b[:count]
    assert count == min(len(a), len(b)) or a[count] != b[count]


def test_a_digest_is_cached_in_its_message_and_does_not_affect_equality():
    one, other = (laid_out(user("Question.")).messages[0] for _ in range(2))
    assert digest(one) == one.loose_digest
    assert other.loose_digest is None
    assert one == other
    assert replace(one, role=Role.ASSISTANT).loose_digest is None
