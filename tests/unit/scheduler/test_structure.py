"""Boundaries of prompts whose markers are single numbers, for readability."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotkeeper.scheduler.prompts.tokens import (
    UNKNOWN,
    Boundary,
    BoundaryKind,
    Markers,
    Tokens,
    boundaries,
    in_replies,
)

SYSTEM, USER, RESULT, REPLY = 90, 91, 92, 93
KNOWN = Markers(user=(Tokens([USER]),), tool=(Tokens([RESULT]),), reply=(Tokens([REPLY]),))
CHATML = Markers(user=(Tokens([80, USER]),), tool=(Tokens([80, USER, RESULT]),), reply=(Tokens([80, REPLY]),))
MISTRAL = Markers(user=(Tokens([USER]),), tool=(Tokens([RESULT]),))
INSIDE = Markers(user=(Tokens([USER]),), reply=(Tokens([REPLY]),), lead_inside=True)


def found(ids, markers=KNOWN, rendered=()):
    return [(b.at, b.kind.value) for b in boundaries(Tokens(ids), markers, rendered)]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([SYSTEM, 1, USER, 2, REPLY], [(2, "head"), (4, "turn")]),
        ([USER, 2, REPLY], [(0, "head"), (2, "turn")]),
        (
            [SYSTEM, 1, USER, 2, REPLY, 3, USER, 4, REPLY, 5, RESULT, 6, RESULT, 7, REPLY],
            [(2, "head"), (6, "user"), (10, "tool"), (12, "tool"), (14, "turn")],
        ),
        ([SYSTEM, 1, REPLY, 2, USER, 3, REPLY], [(2, "head"), (4, "user"), (6, "turn")]),  # a greeting
        ([SYSTEM, 1, RESULT, 2, REPLY], [(2, "head"), (4, "turn")]),
        ([SYSTEM, 1, REPLY], [(2, "turn")]),
        ([SYSTEM, 1, USER, 2, REPLY, 3, 4], [(2, "head"), (4, "turn")]),  # the reply's beginning was given
        ([SYSTEM, 1, USER, 2], [(2, "head"), (4, "turn")]),  # no generation prompt was asked for
        ([SYSTEM, 1, USER, 2, REPLY, 3, USER, 4], [(2, "head"), (6, "user"), (8, "turn")]),
        ([1, 2, 3], []),
        ([], []),
    ],
)
def test_each_user_or_tool_message_begins_at_its_opener(ids, expected):
    assert found(ids) == expected


def test_a_user_message_that_begins_as_a_tool_result_is_a_tool_message():
    chat = [80, SYSTEM, 1, 80, USER, 2, 80, REPLY, 80, USER, RESULT, 3, RESULT, 4, 80, REPLY]
    assert found(chat, CHATML) == [(3, "head"), (8, "tool"), (14, "turn")]


def test_without_a_generation_prompt_the_reply_begins_at_the_end():
    assert found([SYSTEM, 1, USER, 2, 3, USER, 4], MISTRAL) == [(2, "head"), (5, "user"), (7, "turn")]


def test_a_head_inside_the_first_message_is_known_only_from_a_render():
    """The system text is between the opener of the first message and the message's text."""
    chat = [1, USER, 2, 2, 2, 3, REPLY, 4, USER, 5, REPLY]
    head = Boundary(5, BoundaryKind.HEAD)
    assert found(chat, INSIDE, [head]) == [(5, "head"), (8, "user"), (10, "turn")]
    assert found(chat, INSIDE) == [(1, "user"), (8, "user"), (10, "turn")]


def test_boundaries_at_the_same_token_become_one_and_the_head_wins():
    both = [Boundary(2, BoundaryKind.USER), Boundary(2, BoundaryKind.HEAD)]
    assert found([SYSTEM, 1, USER, 2, REPLY], KNOWN, both) == [(2, "head"), (4, "turn")]
    assert found([SYSTEM, 1, 2, 3], UNKNOWN, reversed(both)) == [(2, "head")]


def test_a_prompt_that_does_not_diverge_from_the_other_has_no_boundary_there():
    assert found(
        [SYSTEM, 1, 2], UNKNOWN, [Boundary(3, BoundaryKind.HEAD), Boundary(2, BoundaryKind.USER)]
    ) == [(2, "user")]


def test_an_unknown_template_shows_only_the_generation_prompt():
    tail = Markers(reply=(Tokens([7, 8]),))
    asked = [Boundary(2, BoundaryKind.HEAD), Boundary(5, BoundaryKind.USER)]
    assert found([1, 1, 2, 7, 8, 3, 7, 8], tail, asked) == [(2, "head"), (5, "user"), (6, "turn")]
    assert found([1, 1, 2, 7, 8, 3, 3, 3], tail, asked) == [(2, "head"), (5, "user")]
    assert found([SYSTEM, 1, USER, 2, REPLY], UNKNOWN) == []


@given(
    ids=st.lists(st.sampled_from([1, 80, USER, RESULT, REPLY]), max_size=40),
    markers=st.sampled_from([KNOWN, CHATML, MISTRAL, INSIDE, UNKNOWN]),
    places=st.lists(st.integers(0, 39), max_size=2),
)
def test_any_prompt_has_ascending_boundaries_with_one_head_at_most_and_the_turn_last(ids, markers, places):
    kinds = (BoundaryKind.HEAD, BoundaryKind.USER)
    rendered = [Boundary(at, kind) for at, kind in zip(places, kinds, strict=False)]
    result = boundaries(Tokens(ids), markers, rendered)
    assert list(result) == sorted({b.at: b for b in result}.values())
    assert all(0 <= b.at < len(ids) or (b.at == len(ids) and b.kind is BoundaryKind.TURN) for b in result)
    assert [b.kind for b in result[1:]].count(BoundaryKind.HEAD) == 0
    assert [b.kind for b in result[:-1]].count(BoundaryKind.TURN) == 0


def test_a_token_is_in_a_reply_if_the_last_opener_before_it_opens_one():
    prompt = Tokens([SYSTEM, 1, USER, 2, REPLY, 3, USER, 4, REPLY])
    assert in_replies(range(1, 9), prompt, boundaries(prompt, KNOWN), KNOWN) == {4, 5, 8}


def test_without_markers_no_token_is_taken_to_be_in_a_reply():
    prompt = Tokens([SYSTEM, 1, USER, 2, REPLY, 3])
    assert in_replies([5], prompt, [Boundary(2, BoundaryKind.HEAD)], UNKNOWN) == set()
