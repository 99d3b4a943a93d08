"""Pruned results: restored while the context has room, and all left pruned when it has none."""

from __future__ import annotations

from typing import Any

import pytest

from slotkeeper.api.head import Api
from slotkeeper.conversation.divergence import length
from slotkeeper.conversation.layout import Edit
from slotkeeper.conversation.rules.base import Room
from slotkeeper.conversation.rules.rules import CHARACTERS_A_TOKEN, PrunedResults, Reminders, begins_turn
from unit.conversation.rules.scenes import apply_rule, call, called, laid_out, result, scene, system, user

Doc = dict[str, Any]

CLEARED = "[Old tool result content cleared]"
FILE = "\n".join(f"{n}: a line of the shop's price list, article {n * 37 % 101}" for n in range(1, 81))
ROOM = Room(65536)


def read(name: str, content: Any = FILE) -> list[Doc]:
    """Return a call and its result."""
    return [called(call(name, f'{{"path": "{name}.txt"}}', "read_file")), result(name, content)]


def chat(*messages: Doc, **more: Any) -> Doc:
    return {"messages": [system("You are an agent."), *messages], **more}


ASKED = user("What does a lamp cost?")
NEXT = user("And a chair?")
DONE = called(content="It costs 12.")
SENT = chat(ASKED, *read("c1"), *read("c2"))
PRUNED = chat(ASKED, *read("c1", CLEARED), *read("c2"), DONE, NEXT)
FULL = chat(ASKED, *read("c1"), *read("c2"), DONE, NEXT)


def test_a_pruned_result_is_restored_as_it_was_sent():
    assert apply_rule(PrunedResults(), PRUNED, SENT, room=ROOM) == FULL


@pytest.mark.parametrize("room", [None, Room(2048)], ids=["not known", "too small"])
def test_a_pruned_request_without_room_is_not_edited(room):
    assert apply_rule(PrunedResults(), PRUNED, SENT, room=room) is PRUNED
    assert apply_rule(PrunedResults(), PRUNED, room=ROOM) is PRUNED, "a first request"


def test_all_pruned_results_of_a_request_are_restored_or_none():
    both = chat(ASKED, *read("c1", CLEARED), *read("c2", CLEARED), DONE, NEXT)
    assert apply_rule(PrunedResults(), both, SENT, room=ROOM) == FULL
    room_for_one = Room(estimated_tokens(FULL) * 3 // 4)
    assert apply_rule(PrunedResults(), both, SENT, room=room_for_one) is both


def test_a_result_that_was_sent_pruned_stays_pruned():
    sent = chat(ASKED, *read("c1", CLEARED), *read("c2"))
    assert apply_rule(PrunedResults(), PRUNED, sent, received=SENT, room=ROOM) is PRUNED


def body(content: Any, *behind: Doc) -> Doc:
    """Return a request of the Anthropic API with a result."""
    used = {"type": "tool_use", "id": "c1", "name": "read_file", "input": {"path": "a.txt"}}
    given = {"type": "tool_result", "tool_use_id": "c1", "content": content}
    return {"messages": [ASKED, {"role": "assistant", "content": [used]}, user([given]), *behind]}


def test_a_pruned_result_of_the_anthropic_api_is_restored():
    parts = [{"type": "text", "text": FILE[:100]}, {"type": "text", "text": FILE[100:]}]
    for first in (FILE, parts):
        now, full = body(CLEARED, DONE, NEXT), body(first, DONE, NEXT)
        assert apply_rule(PrunedResults(), now, body(first), api=Api.MESSAGES, room=ROOM) == full


def test_the_reminder_rule_does_not_restore_pruned_results():
    reminded = f"{FILE}\n\n<system-reminder>\nBe quick.\n</system-reminder>"
    sent = chat(ASKED, *read("c1", reminded), *read("c2"))
    assert apply_rule(Reminders(), PRUNED, sent) is PRUNED


# -- room ------------------------------------------------------------------------------------------------


def estimated_tokens(doc: Doc) -> int:
    """Return the number of tokens that the rule estimates without a count."""
    return -(-length(laid_out(doc)) // CHARACTERS_A_TOKEN)


def restores(now: Doc, room: Room, sent: Doc = SENT, **more: Any) -> bool:
    return any(
        isinstance(change, Edit) for change in PrunedResults().changes(scene(now, sent, room=room, **more))
    )


@pytest.mark.parametrize(
    ("asked", "limit"), [(None, 6000), (1000, 7000), (2000, 6000), (32000, 6000), (0, 7999)]
)
def test_up_to_a_quarter_of_the_context_is_reserved_for_the_answer(asked, limit):
    room = Room(8000, asked)
    assert room.limit == limit
    assert room.headroom == 1000


def test_a_restore_at_a_user_message_also_needs_headroom():
    loop = chat(ASKED, *read("c1", CLEARED), *read("c2"), *read("c3", "Nothing."))
    full = chat(ASKED, *read("c1"), *read("c2"), *read("c3", "Nothing."))
    just = Room(estimated_tokens(full) * 4 // 3 + 4)  # a quarter is reserved for the answer
    assert restores(loop, just)
    assert not restores(PRUNED, just)
    assert restores(PRUNED, Room(estimated_tokens(FULL) * 8 // 5 + 8))  # and an eighth is headroom


@pytest.mark.parametrize(
    ("newest", "begins"),
    [
        (NEXT, True),
        (user([{"type": "text", "text": "And a chair?"}]), True),
        (user("<system-reminder>\nBe quick.\n</system-reminder>"), False),
        (DONE, False),
        (read("c3")[1], False),
    ],
    ids=["a user", "a user, in parts", "a reminder", "a reply", "a result"],
)
def test_a_turn_begins_with_a_user_message(newest, begins):
    assert begins_turn(laid_out(chat(ASKED, newest))) is begins


def test_results_in_a_user_message_do_not_begin_a_turn():
    more = (called(content="Wait."), user([{"type": "tool_result", "content": "Nothing."}]))
    full = laid_out(body(FILE, *more), Api.MESSAGES)
    just = Room(-(-length(full) // CHARACTERS_A_TOKEN) * 4 // 3 + 4)
    assert restores(body(CLEARED, *more), just, body(FILE), api=Api.MESSAGES)
    assert not restores(body(CLEARED, DONE, NEXT), just, body(FILE), api=Api.MESSAGES)


def test_tokens_are_estimated_from_the_count_of_the_prompt_before():
    known = length(laid_out(SENT)) // 8  # eight characters each: much less than without a count
    room = Room(estimated_tokens(FULL))
    assert not restores(PRUNED, room)
    assert restores(PRUNED, room, tokens=known)
    assert not restores(PRUNED, Room(65536), tokens=60000)
