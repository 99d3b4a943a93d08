"""The scripted sessions: the effect on a cache that each must have."""

from __future__ import annotations

from itertools import pairwise

import pytest
from benchmarks.sessions import AGENTS, SESSIONS, long_tools

from slotkeeper.bench.demo import REWRITTEN, agents
from slotkeeper.bench.target import Turn

CALL = {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": "{}"}}


def replies():
    number = 0
    while True:
        number += 1
        yield {"role": "assistant", "content": f"Answer {number}.", "tool_calls": [CALL]}


def played(script) -> list[Turn]:
    """Return all turns, with a different answer to each."""
    answers = replies()
    turns = [next(script)]
    while True:
        try:
            turns.append(script.send(next(answers)))
        except StopIteration:
            return turns


def extends(turn: Turn, earlier: Turn) -> bool:
    return turn.messages[: len(earlier.messages)] == earlier.messages


@pytest.mark.parametrize("name", SESSIONS)
def test_a_session_is_the_same_every_time(name):
    assert played(SESSIONS[name]()) == played(SESSIONS[name]())


@pytest.mark.parametrize("name", SESSIONS)
def test_requests_are_greedy_and_capped(name):
    for turn in played(SESSIONS[name]()):
        body = turn.body()
        assert body["temperature"] == 0
        assert 0 < body["max_tokens"] <= 400
        assert body["messages"][-1]["role"] in {"user", "tool"}


@pytest.mark.parametrize(("name", "count"), [("append", 6), ("thinking", 6), ("tool-loop", 12)])
def test_an_append_only_session_only_appends(name, count):
    turns = played(SESSIONS[name]())
    assert len(turns) == count
    assert all(extends(turn, earlier) for earlier, turn in pairwise(turns))


def test_replies_are_sent_back_in_the_next_request():
    second = played(SESSIONS["append"]())[1]
    assert second.messages[2]["content"] == "Answer 1."


def test_a_tool_result_names_the_call_that_it_answers():
    second = played(SESSIONS["tool-loop"]())[1]
    assert second.messages[-1]["tool_call_id"] == CALL["id"]


@pytest.mark.parametrize(("name", "at"), [("clock-first", 0), ("clock-last", -1)])
def test_the_clock_changes_one_line_of_the_system_prompt(name, at):
    lines = [turn.messages[0]["content"].split("\n") for turn in played(SESSIONS[name]())]
    assert len({each[at] for each in lines}) == len(lines)
    assert len({tuple(each[1:] if at == 0 else each[:-1]) for each in lines}) == 1


def test_interleaved_chats_share_only_a_system_prompt():
    turns = {turn.label: turn for turn in played(SESSIONS["interleaved"]())}
    assert list(turns) == ["A1", "title", "B1", "A2", "B2", "A3", "B3", "A4", "B4"]
    assert turns["A1"].messages[0] == turns["B1"].messages[0] != turns["title"].messages[0]
    assert turns["A1"].messages[1] != turns["B1"].messages[1]
    assert extends(turns["A4"], turns["A3"])
    assert extends(turns["B4"], turns["B3"])


@pytest.mark.parametrize("name", ["edits", "many-turns"])
def test_an_edited_session_returns_to_its_first_branch(name):
    turns = played(SESSIONS[name]())
    main = [turn for turn in turns if turn.label.startswith("turn ")]
    back = turns[-1]
    assert extends(back, main[-1])
    assert any(not extends(turn, main[-1]) and not extends(main[-1], turn) for turn in turns)


def test_the_agents_of_the_demo_share_a_system_text_and_one_message_is_rewritten():
    turns = played(agents())
    assert len(turns) == 19
    chats = [turn for turn in turns if not turn.label.startswith("title")]
    assert len({turn.messages[0]["content"] for turn in chats}) == 1
    assert {turn.label[0] for turn in chats} == {"A", "B"}
    assert turns[-1].messages[-1]["content"] == REWRITTEN
    assert sum(turn.label.startswith("title") for turn in turns) == 2


@pytest.mark.parametrize(("name", "questions"), [("document", 6), ("long-document", 11)])
def test_questions_about_a_document_diverge_only_behind_it(name, questions):
    turns = played(SESSIONS[name]())
    asked = [turn.messages[-1]["content"] for turn in turns]
    assert all(len(turn.messages) == 2 for turn in turns)
    assert len({turn.messages[0]["content"] for turn in turns}) == 1
    assert len({text.rpartition("\n\n")[0] for text in asked}) == 1
    assert len({text.rpartition("\n\n")[2] for text in asked}) == len(turns) == questions


def test_agents_share_system_text_and_tools_and_other_sessions_alternate_with_them():
    turns = played(SESSIONS["agents"]())
    ours = [turn for turn in turns if turn.session is None]
    others = [turn for turn in turns if turn.session == "others"]
    assert len(ours) == len(others) == 2 * AGENTS
    assert len({turn.messages[0]["content"] for turn in ours}) == 1
    assert all(turn.fields["tools"] == long_tools() for turn in ours)
    assert len({turn.messages[1]["content"] for turn in ours}) == AGENTS
    assert all(extends(answer, call) for call, answer in zip(ours[::2], ours[1::2], strict=True))
    assert [turn.session for turn in turns[:5]] == [None, None, "others", "others", None]
    assert all(extends(later, earlier) for earlier, later in zip(others, others[2:], strict=False))
