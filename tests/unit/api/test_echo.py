"""How a client sends replies back is learned from one echo, and predicted from then on."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotkeeper.api.answers.echo import (
    Habit,
    ReasoningForm,
    echoed,
    gleaned,
    guesses,
    learnt,
    next_turns,
    returnable,
    thoughts,
    trail,
    usual,
)
from slotkeeper.api.head import Api

Message = dict[str, Any]

THOUGHT = "First this,\nthen that.\n"
ASKED: list[Message] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Look."}]
NEXT: Message = {"role": "user", "content": "And?"}
RESULT: Message = {"role": "tool", "tool_call_id": "c0", "content": "a\nb"}


def call(arguments: str = '{"path": "\u00e4.py", "limit": 3}', number: int = 0) -> Message:
    function = {"name": "read", "arguments": arguments}
    return {"id": f"c{number}", "type": "function", "function": function}


def reply(content: str = "Done.", thought: str = THOUGHT, calls: list[Message] | None = None) -> Message:
    said: Message = {"role": "assistant", "content": content}
    if thought:
        said["reasoning_content"] = thought
    return {**said, "tool_calls": calls} if calls else said


def taught(said: Message, echo: Message, after: Message, habit: Habit | None = None) -> Habit:
    return learnt(habit or Habit(), said, [*ASKED, echo, after], len(ASKED), before=0)


# -- clients, written independently of the product's code ----------------------------------------------


def keeps(said: Message) -> Message:
    return json.loads(json.dumps(said))


def drops(said: Message) -> Message:
    return {key: value for key, value in said.items() if key != "reasoning_content"}


def trims(said: Message) -> Message:
    return {k: v.strip() if isinstance(v, str) else v for k, v in said.items()}


def trims_ends(said: Message) -> Message:
    return {**said, "content": said["content"].rstrip()}


def tags(said: Message) -> Message:
    thought = said.get("reasoning_content")
    head = f"<think>\n{thought.strip()}\n</think>\n\n" if thought else ""
    return {**drops(said), "content": head + said["content"].strip()}


def adds_a_part(said: Message) -> Message:
    found = [said.get("reasoning_content"), said["content"]]
    return {**drops(said), "content": [{"type": "text", "text": part} for part in found if part]}


def nulls(said: Message) -> Message:
    return {**said, "content": said["content"] or None}


def parts(said: Message) -> Message:
    return {**said, "content": [{"type": "text", "text": said["content"]}] if said["content"] else []}


def rewriting(write):
    def client(said: Message) -> Message:
        calls = [dict(one, function=dict(one["function"])) for one in said.get("tool_calls", [])]
        for one in calls:
            one["function"]["arguments"] = write(json.loads(one["function"]["arguments"]))
        return {**said, "tool_calls": calls} if calls else said

    return client


def in_order(value: Message) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=False)


def as_javascript(value: Message) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


CLIENTS = {
    "keeps": keeps,
    "drops": drops,
    "trims": trims,
    "trims the end": trims_ends,
    "tags": tags,
    "adds a part": adds_a_part,
    "nulls": nulls,
    "parts": parts,
    "javascript": rewriting(as_javascript),
    "python": rewriting(json.dumps),
    "go": rewriting(in_order),
    "an object": rewriting(lambda value: value),
}
WORDS = st.sampled_from(["", "Yes.", " Yes. ", "Yes.\n\n", "\n", "Two\nlines"])
THOUGHTS = st.sampled_from(["", "Hm.", "Hm.\n", "\nHm. So\nit is.\n"])
VALUES = st.dictionaries(st.sampled_from("abcdef"), st.sampled_from([1, "x", "\u00e4", None, [1.5]]))
CALLS = st.lists(VALUES.map(lambda value: call(json.dumps(value))), max_size=2)
REPLIES = st.builds(reply, WORDS, THOUGHTS, CALLS)


def spoken(message: Message) -> tuple[Any, ...]:
    """Return the parts of a message that matter to the engine, except ids."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    said = [part["text"] for part in parts if part["text"]]
    calls = [one["function"] for one in message.get("tool_calls", [])]
    written = [a if isinstance(a, str) else as_javascript(a) for a in (one["arguments"] for one in calls)]
    return said, message.get("reasoning_content") or "", [one["name"] for one in calls], written


@pytest.mark.parametrize("name", CLIENTS)
@given(first=REPLIES, second=REPLIES)
def test_a_rewrite_that_a_client_made_once_is_predicted_or_left_open(name, first, second):
    """No prediction is ever wrong: if one reply does not distinguish two habits, neither is chosen."""
    client, after = CLIENTS[name], RESULT if first.get("tool_calls") else NEXT
    habit = taught(first, client(first), after)
    assert not habit.puzzling
    assert spoken(echoed(habit, first)) == spoken(client(first))
    possible = guesses(habit, second, ASKED)
    if len(possible) == 1:
        assert spoken(echoed(possible[0], second)) == spoken(client(second))
    again = taught(second, client(second), after, habit)
    assert not again.puzzling
    for said in (first, second):
        (known,) = guesses(again, said, ASKED)
        assert spoken(echoed(known, said)) == spoken(client(said))


def test_an_unexplained_echo_stops_predictions_until_a_later_one_is_explained():
    said = reply()
    habit = taught(said, {**said, "content": "Rewritten."}, NEXT)
    assert habit.puzzling
    assert guesses(habit, said, ASKED) == ()
    assert not taught(said, keeps(said), NEXT, habit).puzzling


def test_an_echo_with_one_of_two_calls_is_unexplained():
    said = reply(calls=[call(), call(number=1)])
    assert taught(said, {**said, "tool_calls": said["tool_calls"][:1]}, RESULT).puzzling


def test_a_reply_that_fits_two_habits_leaves_both_open():
    said = reply(thought="", calls=[call('{"a":1}')])
    habit = taught(said, keeps(said), RESULT)
    sorted_too = reply(thought="", calls=[call('{"b":1,"a":1}')])
    assert len({written(guess, sorted_too) for guess in both(habit, sorted_too)}) == 2
    known = taught(sorted_too, keeps(sorted_too), RESULT, habit)
    assert len(guesses(known, sorted_too, ASKED)) == 1


def written(habit: Habit, said: Message) -> str:
    """Return the arguments of the first call, as a client with this habit sends them back."""
    return str(echoed(habit, said)["tool_calls"][0]["function"]["arguments"])


def both(habit: Habit, said: Message) -> tuple[Habit, ...]:
    found = guesses(habit, said, ASKED)
    assert len(found) == 2
    return found


def test_the_unknown_habits_include_the_order_of_arguments():
    """Most templates get parsed arguments: then only the order matters."""
    said = reply(thought="", calls=[call('{"b":1,"a":1}')])
    guessed = [written(guess, said) for guess in both(Habit(), said)]
    assert [list(json.loads(one)) for one in guessed] == [["b", "a"], ["a", "b"]]
    assert written(usual(Api.MESSAGES), reply(calls=[call()])) == '{"path":"\u00e4.py","limit":3}'


def test_reasoning_may_be_kept_or_dropped_while_the_habit_is_unknown():
    kept, dropped = both(Habit(), reply())
    assert echoed(kept, reply())["reasoning_content"] == THOUGHT
    assert "reasoning_content" not in echoed(dropped, reply())
    assert len(guesses(Habit(), reply(thought=""), ASKED)) == 1


def test_reasoning_moved_into_content_is_predicted_only_for_the_kind_of_reply_that_showed_it():
    """A reply without text does not show what is between reasoning and text."""
    silent, speaking = reply(content="", calls=[call()]), reply(calls=[call()])
    habit = taught(silent, tags(silent), RESULT)
    assert habit.calling is ReasoningForm.INLINE
    assert guesses(habit, speaking, ASKED) == ()
    assert spoken(echoed(habit, silent)) == spoken(tags(silent))


# -- habits learned from a history ---------------------------------------------------------------------


def test_reasoning_in_a_history_shows_that_the_client_keeps_reasoning():
    history = [*ASKED, reply(calls=[call()]), RESULT]
    assert gleaned(Habit(), history).calling is ReasoningForm.KEPT
    assert gleaned(Habit(), history).forgets is None
    assert gleaned(Habit(), [*history, reply(thought=""), NEXT]).forgets is False


@pytest.mark.parametrize(
    ("answers", "before", "after"),
    [([RESULT], False, False), ([NEXT, RESULT], True, False), ([RESULT, NEXT], False, True)],
)
def test_user_messages_beside_tool_results_are_predicted(answers, before, after):
    said = reply(calls=[call()])
    habit = gleaned(replace(Habit(), asks_before=True, asks_after=True), [*ASKED, said, *answers])
    assert (habit.asks_before, habit.asks_after) == (before, after)
    roles = [[m["role"] for m in turn[len(ASKED) + 1 :]] for turn in next_turns(habit, ASKED, said)]
    assert roles[:2] == [["tool"], ["tool"]]
    assert roles[2:] == ([[m["role"] for m in answers]] if before or after else [])


def test_a_client_that_drops_reasoning_at_the_next_user_message_is_recognised():
    """As some models need it: reasoning stays between calls, and is dropped at the next user message."""
    called = reply(calls=[call()])
    asked = [*ASKED, called, RESULT]
    said = reply()
    after = [*ASKED, drops(called), RESULT, drops(said), NEXT]
    habit = gleaned(Habit(), asked)
    assert len(guesses(habit, said, asked)) == len(guesses(habit, drops(said), asked)) == 2
    habit = gleaned(learnt(habit, said, after, len(asked), before=thoughts(asked)), after)
    assert (habit.calling, habit.answering, habit.forgets) == (
        ReasoningForm.KEPT,
        ReasoningForm.DROPPED,
        True,
    )
    assert len(guesses(habit, said, asked)) == 1
    for turn in next_turns(habit, asked, said):
        assert turn[:-1] == after[:-1]
    for turn in next_turns(habit, asked, called):
        assert turn[: len(asked)] == asked


# -- the next turn -------------------------------------------------------------------------------------


def test_each_call_gets_a_result_and_the_two_predicted_result_texts_differ_at_once():
    said = reply(calls=[call(), call(number=1)])
    one, other = next_turns(Habit(), ASKED, said)
    assert [message.get("tool_call_id") for message in one[-2:]] == ["c0", "c1"]
    assert one[:-2] == other[:-2]
    assert one[-2]["content"].strip()[0] != other[-2]["content"].strip()[0]


def test_call_ids_that_the_client_replaces_differ_between_predicted_turns():
    said = reply(calls=[call()])
    echo = {**said, "tool_calls": [{**call(), "id": "its own"}]}
    habit = taught(said, echo, {**RESULT, "tool_call_id": "its own"})
    assert not habit.puzzling
    one, other = next_turns(habit, ASKED, said)
    assert one[-2]["tool_calls"][0]["id"] != other[-2]["tool_calls"][0]["id"]
    assert said["tool_calls"][0]["id"] == "c0"


def test_results_carry_the_tool_name_if_the_client_writes_it():
    history = [*ASKED, reply(calls=[call()]), {**RESULT, "name": "read"}]
    for turn in next_turns(Habit(), history, reply(calls=[call()])):
        assert turn[-1]["name"] == "read"


@pytest.mark.parametrize(
    ("reply_sent", "expected"),
    [
        (reply(), True),
        (reply(content="", calls=[call()]), True),
        (reply(content=""), False),  # cut off during its reasoning
        (reply(calls=[call('{"path": "a')]), False),
        (reply(calls=[call('"a"')]), False),
        (reply(calls=[call("[" * 100_000)]), False),
    ],
    ids=["words", "a call", "thoughts only", "half a call", "no object", "a deep call"],
)
def test_only_a_finished_reply_is_returnable(reply_sent, expected):
    assert returnable(reply_sent) is expected


def test_the_trail_of_a_conversation_ignores_reasoning():
    kept = trail([*ASKED, reply(), NEXT])
    assert kept == trail([*ASKED, drops(reply()), NEXT])
    assert kept[:2] == trail(ASKED)
    assert kept[2:] != trail([*ASKED, reply("Other."), NEXT])[2:]
