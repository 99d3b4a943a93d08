"""Tool calls that a client sends back changed: with reformatted arguments (opencode, pi) or new ids."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slotkeeper.api.head import Api
from slotkeeper.conversation.rules.base import alike
from slotkeeper.conversation.rules.rules import CallIds, ToolCalls
from unit.conversation.rules.scenes import apply_rule, result, system, user
from unit.conversation.rules.scenes import call as called
from unit.conversation.rules.scenes import called as reply

Doc = dict[str, Any]

SAMPLED = '{"path": "/src/caf\\u00e9.py", "limit": 40.0, "options": {"b": [1, 2], "a": null}}'
REWRITTEN = '{"limit":40,"options":{"a":null,"b":[1,2]},"path":"/src/café.py"}'


def call(id_: str, arguments: str = SAMPLED, name: str = "read") -> Doc:
    return called(id_, arguments, name)


def chat(*behind: Doc) -> Doc:
    return {"model": "m", "messages": [system("You are an agent."), user("Read it."), *behind]}


def written(doc: Doc) -> list[str]:
    return [c["function"]["arguments"] for m in doc["messages"] for c in m.get("tool_calls", ())]


def ids(doc: Doc) -> list[list[str]]:
    """Return for each message the ids of its calls, or the id of the call that the message answers."""
    own = [[c["id"] for c in m.get("tool_calls", ())] for m in doc["messages"]]
    return [
        of or [m["tool_call_id"]]
        for of, m in zip(own, doc["messages"], strict=True)
        if of or "tool_call_id" in m
    ]


# -- arguments ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "returned", [REWRITTEN, json.dumps(json.loads(SAMPLED)), json.dumps(json.loads(SAMPLED), indent=1)]
)
def test_rewritten_arguments_are_restored_as_sampled(returned):
    now = chat(reply(call("c1", returned)), result("c1"))
    after = apply_rule(ToolCalls(), now, chat(), replies=[reply(call("c1"))])
    assert after == chat(reply(call("c1")), result("c1"))


@pytest.mark.parametrize(
    "returned",
    [
        call("c1", REWRITTEN.replace("40", "41")),
        call("c1", REWRITTEN.replace("null", "0")),
        call("c1", REWRITTEN.replace("[1,2]", "[2,1]")),
        call("c1", REWRITTEN.replace("[1,2]", "[true,2]")),
        call("c1", REWRITTEN[:-1]),  # not JSON
        call("c1", ""),
        call("c1", "[" * 100_000),
        call("c1", REWRITTEN, name="write"),
        call("c2", REWRITTEN),
    ],
    ids=lambda made: f"{made['id']} {made['function']['name']} {made['function']['arguments'][:90]}",
)
def test_arguments_of_another_call_or_with_other_values_are_sent_unchanged(returned):
    now = chat(reply(returned), result(returned["id"]))
    assert apply_rule(ToolCalls(), now, chat(), replies=[reply(call("c1"))]) is now


def test_a_call_that_was_already_sent_keeps_its_sent_form_whenever_the_client_changes_it():
    sent, again = chat(reply(call("c1", REWRITTEN)), result("c1")), json.dumps(json.loads(REWRITTEN))
    now = chat(reply(call("c1", again)), result("c1"), reply(call("c2", REWRITTEN)))
    replies = [reply(call("c1")), reply(call("c2"))]
    assert written(apply_rule(ToolCalls(), now, sent, replies=replies)) == [REWRITTEN, SAMPLED]
    restored = chat(reply(call("c1")), result("c1"))
    assert written(apply_rule(ToolCalls(), now, restored, received=sent))[0] == SAMPLED


def test_objects_of_anthropic_clients_get_their_keys_in_the_sampled_order():
    def body(given: Doc) -> Doc:
        use = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": given}
        done = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "1: import os"}
        return {
            "max_tokens": 9,
            "system": [{"type": "text", "text": "You are an agent."}],
            "messages": [
                {"role": "user", "content": "Read it."},
                {"role": "assistant", "content": [use]},
                {"role": "user", "content": [done]},
            ],
        }

    first = {**body({}), "messages": body({})["messages"][:1]}
    told = [reply(call("toolu_1"))]
    after = apply_rule(ToolCalls(), body(json.loads(REWRITTEN)), first, replies=told, api=Api.MESSAGES)
    assert json.dumps(after) == json.dumps(body(json.loads(SAMPLED)))


def test_function_call_items_of_codex_get_the_sampled_text():
    def body(*items: Doc) -> Doc:
        asked = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Read it."}]}
        return {"instructions": "You are an agent.", "input": [asked, *items]}

    def item(arguments: str) -> Doc:
        return {"type": "function_call", "call_id": "call_1", "name": "read", "arguments": arguments}

    output = {"type": "function_call_output", "call_id": "call_1", "output": "1: import os"}
    now, told = body(item(REWRITTEN), output), [reply(call("call_1"))]
    assert apply_rule(ToolCalls(), now, body(), replies=told, api=Api.RESPONSES) == body(
        item(SAMPLED), output
    )


@pytest.mark.parametrize("replies", [[], [reply(call("c1"))]])
def test_a_client_that_returns_calls_unchanged_is_not_edited(replies):
    sent = chat(reply(call("c0")), result("c0"))
    now = chat(reply(call("c0")), result("c0"), reply(call("c1")), result("c1"))
    assert apply_rule(ToolCalls(), now, sent, replies=replies) is now


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, True), (0, False), (2**53 + 1, float(2**53)), (1, "1"), (None, False), ([1], [1, 1])],
)
def test_values_that_only_python_or_a_double_considers_equal_are_different(one, other):
    assert alike(one, one)
    assert not alike(one, other)
    assert not alike(other, one)


# -- ids ------------------------------------------------------------------------------------------------


def test_replaced_call_ids_are_restored_together_with_those_of_the_results():
    sent = chat(reply(call("a1"), call("a2", name="list")), result("a1"), result("a2"))
    again = (reply(call("b1"), call("b2", REWRITTEN, name="list")), result("b2"), result("b1"))
    after = apply_rule(CallIds(), chat(*again, reply(call("b3")), result("b3")), sent)
    assert ids(after) == [["a1", "a2"], ["a2"], ["a1"], ["b3"], ["b3"]]
    assert written(after) == [SAMPLED, REWRITTEN, SAMPLED], "reformatted arguments stay"


@pytest.mark.parametrize("changed", [call("b1", name="write"), call("b1", '{"path": "other.py"}')])
def test_a_different_call_keeps_its_new_id(changed):
    now = chat(reply(changed), result("b1"))
    assert apply_rule(CallIds(), now, chat(reply(call("a1")), result("a1"))) is now


def test_an_id_that_now_belongs_to_another_call_is_not_given_twice():
    """Ids are numbered from the newest: the first call's old id is now the second's."""
    sent = chat(reply(call("call_0")), result("call_0"))
    now = chat(reply(call("call_1")), result("call_1"), reply(call("call_0")), result("call_0"))
    assert apply_rule(CallIds(), now, sent) is now


def test_results_of_a_client_with_one_id_for_all_calls_belong_to_the_call_before_them():
    """Each result belongs to the call before it."""
    sent = chat(reply(call("a1")), result("a1"), reply(call("a2")), result("a2"))
    now = chat(*(m for _ in range(3) for m in (reply(call("call_0")), result("call_0"))))
    assert ids(apply_rule(CallIds(), now, sent)) == [
        [i] for i in ("a1", "a1", "a2", "a2", "call_0", "call_0")
    ]
