import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotkeeper.api.head import Api
from slotkeeper.api.request import parse

ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES, "content": st.text(max_size=5)}), max_size=6)

TURN = [
    {"role": "user", "content": [{"type": "text", "text": "look", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "ls", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "a"}]},
]


def hash_chain(api=Api.CHAT, **body):
    return parse(api, orjson.dumps(body)).hash_chain


@given(first=MESSAGES, second=MESSAGES)
def test_a_hash_chain_continues_another_only_if_its_messages_do(first, second):
    a, b = hash_chain(messages=first), hash_chain(messages=second)
    assert len(a) == len(first) + 1
    assert (b[: len(a)] == a) == (second[: len(first)] == first)


@pytest.mark.parametrize(
    "change",
    [
        {"tools": [{"type": "function", "function": {"name": "ls"}}]},
        {"tool_choice": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
        {"response_format": {"type": "json_object"}},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"model": "other"},
    ],
)
def test_a_change_before_the_messages_changes_only_the_first_digest(change):
    plain, changed = hash_chain(messages=TURN[:1]), hash_chain(messages=TURN[:1], **change)
    assert plain[0] != changed[0]
    assert plain[1:] == changed[1:]  # equal messages are still recognised


@pytest.mark.parametrize(
    "change",
    [
        *({"temperature": 1}, {"stream": True}, {"max_tokens": 9}, {"seed": 4}, {"n": 2}),
        *({"tool_choice": "required"}, {"parallel_tool_calls": True}),  # a grammar, not a prompt
    ],
)
def test_sampling_fields_do_not_change_the_hash_chain(change):
    assert hash_chain(messages=TURN[:1]) == hash_chain(messages=TURN[:1], **change)


def test_a_system_prompt_outside_the_messages_changes_only_the_first_digest():
    plain = hash_chain(Api.MESSAGES, messages=TURN[:1])
    brief = hash_chain(Api.MESSAGES, system="Be brief.", messages=TURN[:1])
    assert len(plain) == len(brief) == 2
    assert plain[0] != brief[0]
    assert len(hash_chain(Api.RESPONSES, instructions="x", input="y")) == 2


def items(mark):
    return [
        {"role": "user", "type": "message", "id": mark, "content": "a"},
        {"role": "assistant", "type": "message", "id": mark, "status": mark, "content": "b"},
        {"type": "function_call", "id": mark, "call_id": "c", "name": "ls", "arguments": "{}"},
        {"type": "function_call_output", "id": mark, "call_id": "c", "output": "d"},
    ]


def stamped(stamp):
    header = f"x-anthropic-billing-header: cc_version=2; cch={stamp};You are"
    return {"system": [{"type": "text", "text": header}], "messages": TURN}


ORDERED = {"name": "ls", "parameters": {"a": 1, "b": 2}}
TURNED = {"parameters": {"b": 2, "a": 1}, "name": "ls"}
PLAIN = [{"role": "user", "content": "look"}, *TURN[1:]]


@pytest.mark.parametrize(
    ("api", "one", "other"),
    [
        (Api.CHAT, {"messages": [], "tools": [ORDERED]}, {"messages": [], "tools": [TURNED]}),
        (Api.MESSAGES, {"messages": TURN}, {"messages": PLAIN}),
        (Api.MESSAGES, stamped("a51f5"), stamped("00000")),
        (Api.RESPONSES, {"input": items("x")}, {"input": items("y")}),
    ],
    ids=["order of keys", "cache marks and a single text block", "billing stamp", "ids and statuses"],
)
def test_what_does_not_reach_the_prompt_does_not_change_the_hash_chain(api, one, other):
    assert hash_chain(api, **one) == hash_chain(api, **other)


def test_the_parts_of_a_message_change_the_hash_chain():
    parts = [{"type": "text", "text": "lo"}, {"type": "text", "text": "ok"}]
    assert hash_chain(messages=[{"role": "user", "content": parts}]) != hash_chain(messages=PLAIN[:1])
