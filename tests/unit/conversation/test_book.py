"""Conversations are found again by name and by content, and never another client's."""

from __future__ import annotations

import pytest

from slotkeeper.conversation.book import COMPARED, REPLIES, Conversations
from slotkeeper.conversation.layout import Match, Who
from slotkeeper.conversation.likeness import likeness
from unit.conversation.talks import (
    DONE,
    HISTORY,
    ME,
    NEXT,
    NOBODY,
    ROUND,
    SYSTEM,
    TASK,
    TOOLS,
    Desk,
    chat,
    reply,
    result,
    system,
    tool,
    user,
)

FIRST = chat(system(), TASK)
THEN = chat(system(), TASK, *ROUND)
LATER = chat(system(), *HISTORY)


@pytest.mark.parametrize("who", [ME, NOBODY])
def test_a_request_goes_on_from_the_one_before_it(who):
    desk = Desk()
    _, line = desk.sends(FIRST, who)
    match, again = desk.sends(THEN, who)
    assert (match.before, match.common) == (line, 1)
    assert again is line
    match, again = desk.sends(LATER, who)
    assert (match.before, match.common, again) == (line, 3, line)
    assert line.received is LATER
    assert len(desk.book) == 1


def test_two_keys_never_share_a_conversation():
    desk = Desk()
    desk.sends(LATER)
    match = desk.book.find(Who("another key/agent", ME.name), LATER)
    assert match == Match(before=None)
    _, line = desk.sends(LATER)
    assert likeness(line, ME, LATER) is not None
    assert likeness(line, Who("another key/agent", ME.name), LATER) is None


def test_two_names_never_share_one_either():
    desk = Desk()
    desk.sends(THEN)
    assert desk.book.find(Who(ME.client, "ses_2"), LATER).before is None


def test_a_name_on_one_side_only_lets_the_content_decide():
    desk = Desk()
    _, line = desk.sends(THEN, NOBODY)
    match, again = desk.sends(LATER, ME)
    assert match.before is line
    assert again is line
    assert line.who == ME


def test_a_new_session_with_the_same_first_words_is_a_new_conversation():
    desk = Desk()
    _, line = desk.sends(LATER, NOBODY)
    match, other = desk.sends(FIRST, NOBODY)
    assert match.before is None
    assert match.sibling is line
    assert other is not line


def test_its_second_request_follows_its_first_not_the_other_session():
    desk = Desk()
    desk.sends(LATER, NOBODY)
    _, other = desk.sends(FIRST, NOBODY)
    match, _ = desk.sends(chat(system(), TASK, *ROUND, reply("I give up."), NEXT), NOBODY)
    assert match.before is other


def test_the_very_same_request_again_is_a_retry_of_it():
    desk = Desk()
    _, line = desk.sends(FIRST, NOBODY)
    match, again = desk.sends(chat(system(), TASK), NOBODY)
    assert (match.before, match.common, again) == (line, 1, line)


def test_the_same_task_in_another_folder_is_no_retry():
    desk = Desk()
    desk.sends(FIRST, NOBODY)
    elsewhere = chat(system(SYSTEM.replace("/home/dev/shop", "/home/dev/play")), TASK)
    assert desk.book.find(NOBODY, elsewhere).before is None


def test_a_changed_date_does_not_hide_a_conversation():
    desk = Desk()
    _, line = desk.sends(THEN, NOBODY)
    tomorrow = chat(system(SYSTEM.replace("Sat Nov 21", "Sun Nov 22")), *HISTORY)
    match = desk.book.find(NOBODY, tomorrow)
    assert (match.before, match.common) == (line, 3)


def test_a_branch_leaves_the_old_line_as_it_is_and_takes_over_what_both_have():
    desk = Desk()
    match = desk.book.find(ME, LATER)
    line = desk.book.saw(
        match,
        ME,
        received=LATER,
        sent=LATER,
        notes={1: ("The date is now Sunday.",), 5: ("The branch is now main.",)},
        noted={"date": "now Sunday", "git_status": "now main"},
        now=1.0,
    )
    back = chat(system(), TASK, *ROUND, reply("I would rather not."), NEXT)
    match, branch = desk.sends(back)
    assert match.common == 3
    assert match.before is not None
    assert match.before.number == line.number
    assert match.before.notes == {1: ("The date is now Sunday.",)}
    assert match.before.noted == {"date": "now Sunday"}  # the other note does not stand in this history
    assert branch is not line
    assert line.received is LATER
    assert set(line.notes) == {1, 5}
    assert desk.book.find(ME, chat(system(), *HISTORY, DONE, NEXT)).before is line
    assert (
        desk.book.find(ME, chat(system(), TASK, *ROUND, reply("I would rather not."), NEXT, DONE)).before
        is branch
    )


def test_a_summary_under_the_same_name_is_the_same_conversation():
    desk = Desk()
    _, line = desk.sends(LATER)
    after = chat(system(), user("This session is being continued from a previous conversation: the parser."))
    match, new = desk.sends(after)
    assert match.before is not None
    assert (match.before.number, match.common) == (line.number, 0)
    assert match.before.noted == {}
    assert new is not line


def test_another_task_under_the_same_name_is_not():
    desk = Desk()
    desk.sends(LATER)
    assert desk.book.find(ME, chat(system(), user("What is the time?"))).before is None


def test_the_next_turn_does_not_go_on_from_a_suggestion():
    desk = Desk()
    _, line = desk.sends(chat(system(), *HISTORY), NOBODY)
    match, aside = desk.sends(chat(system(), *HISTORY, DONE, user("[SUGGESTION MODE: Suggest.]")), NOBODY)
    assert match.before is line
    assert aside is not line
    match, again = desk.sends(chat(system(), *HISTORY, DONE, NEXT), NOBODY)
    assert match.before is line
    assert again is line


def test_nor_does_it_on_the_next_day():
    """The suggestion shares one message more, but is not the conversation."""
    desk = Desk()
    _, line = desk.sends(chat(system(), *HISTORY), NOBODY)
    desk.sends(chat(system(), *HISTORY, DONE, user("[SUGGESTION MODE: Suggest.]")), NOBODY)
    tomorrow = chat(system(SYSTEM.replace("Sat Nov 21", "Sun Nov 22")), *HISTORY, DONE, NEXT)
    assert desk.book.find(NOBODY, tomorrow).before is line


def test_a_context_message_before_the_task_is_no_first_message():
    desk = Desk()
    context = user("<environment_context>\n  <cwd>/home/dev/shop</cwd>\n</environment_context>")
    desk.sends(chat(system(), context, TASK, *ROUND), NOBODY)
    desk.sends(chat(system(), context, TASK, *ROUND), ME)
    assert desk.book.find(NOBODY, chat(system(), context, user("Something else."))).before is None
    assert desk.book.find(ME, chat(system(), context, user("Something else."))).before is None


def test_siblings_have_the_same_system_text_or_the_same_tools():
    desk = Desk()
    _, line = desk.sends(FIRST)
    other = Who(ME.client, "ses_2")
    assert desk.book.find(other, chat(system("Another."), user("Hi."))).sibling is line
    assert desk.book.find(other, chat(system(), user("Hi."), tools=[])).sibling is line
    assert desk.book.find(other, chat(system("Another."), user("Hi."), tools=[])).sibling is None
    assert desk.book.find(other, chat(system("Another."), user("Hi."), tools=[])).beside is line


def test_the_one_not_asked_for_the_longest_goes_first():
    desk = Desk(most=2)
    lines = [desk.sends(chat(system(), user(f"Task {n}.")), Who("key", f"{n}"))[1] for n in (1, 2)]
    desk.sends(chat(system(), user("Task 1.")), Who("key", "1"))
    desk.sends(chat(system(), user("Task 3.")), Who("key", "3"))
    found = [desk.book.find(Who("key", f"{n}"), chat(system(), user(f"Task {n}."))).before for n in (1, 2, 3)]
    assert found[0] is lines[0]
    assert found[1] is None
    assert found[2] is not None


def test_what_is_kept_stays_within_its_characters_and_is_counted():
    desk = Desk(characters=20_000)
    for n in range(20):
        desk.sends(chat(system(), user(f"Task {n}. " + "More. " * 500)), Who("key", f"{n}"))
        assert desk.book.characters <= 20_000
    lines = [
        desk.book.find(Who("key", f"{n}"), chat(system(), user(f"Task {n}."))).sibling for n in range(20)
    ]
    assert 1 <= len(desk.book) < 20
    assert desk.book.characters >= 3000 * len(desk.book)
    assert any(lines)


def test_the_latest_stays_however_long_it_is():
    desk = Desk(characters=10)
    _, line = desk.sends(LATER)
    assert desk.book.find(ME, LATER).before is line


def test_a_forgotten_one_is_not_found_and_weighs_nothing():
    desk = Desk()
    _, line = desk.sends(LATER)
    desk.book.forget(line)
    desk.book.forget(line)
    assert desk.book.find(ME, LATER) == Match(before=None)
    assert (len(desk.book), desk.book.characters) == (0, 0)
    assert repr(desk.book) == "<Conversations 0 | 0 of 134217728 characters>"
    assert desk.book._index == {}


def test_a_conversation_forgotten_during_its_request_begins_again():
    desk = Desk()
    _, line = desk.sends(THEN)
    match = desk.book.find(ME, LATER)
    desk.book.forget(line)
    again = desk.book.saw(match, ME, received=LATER, sent=LATER, notes={}, noted={}, now=9.0)
    assert again is not line
    assert len(desk.book) == 1
    desk.book.replied(line, {"role": "assistant", "content": "too late"})
    assert desk.book.characters == again.size


def test_replies_are_kept_by_the_ids_of_their_calls_and_inherited():
    desk = Desk()
    _, line = desk.sends(THEN)
    told = reply(edit={"path": "a"})
    weight = desk.book.characters
    desk.book.replied(line, told)
    assert line.replies == {"call_edit": told}
    assert desk.book.characters > weight
    _, branch = desk.sends(chat(system(), TASK, reply("No."), NEXT))
    assert branch.replies == {}  # that reply is not in its history
    _, branch = desk.sends(chat(system(), TASK, ROUND[0], result("read", "Other."), told, NEXT))
    assert branch.replies == {"call_edit": told}


def test_of_many_replies_the_oldest_go():
    desk = Desk()
    _, line = desk.sends(THEN)
    for n in range(REPLIES + 5):
        desk.book.replied(line, {"role": "assistant", "content": f"reply {n}"})
    assert len(line.replies) == REPLIES
    assert next(iter(line.replies.values()))["content"] == "reply 5"
    assert desk.book.characters == line.size


def test_few_are_compared_of_thousands_that_begin_the_same():
    desk = Desk()
    for n in range(2 * COMPARED):
        desk.sends(chat(system(), TASK, reply(f"Answer {n}."), NEXT), Who("key", f"{n}"))
    crowded = [key for key, listed in desk.book._index.items() if len(listed) > COMPARED]
    assert crowded
    assert all(len(list(desk.book._latest([key]))) == COMPARED for key in crowded)
    match = desk.book.find(
        Who("key", "3"), chat(system(), TASK, reply("Answer 3."), NEXT, DONE, user("More."))
    )
    assert match.before is not None
    assert match.before.who.name == "3"


def test_an_empty_request_begins_a_conversation():
    book = Conversations()
    empty = chat()
    match = book.find(NOBODY, empty)
    assert match == Match(before=None)
    assert book.saw(match, NOBODY, received=empty, sent=empty, notes={}, noted={}, now=0.0).number == 1


# -- one agent's line of requests ---------------------------------------------------------------------------

FEW = [TOOLS[2], TOOLS[0]]  # in another order


def test_a_sub_agent_with_some_of_the_tools_is_remembered_by_itself():
    """Qwen Code's memory request has the history, and some of the tools in another order."""
    desk = Desk()
    _, main = desk.sends(chat(system(), *HISTORY))
    match, sub = desk.sends(chat(system(), *HISTORY, DONE, NEXT, tools=FEW))
    assert (match.before, match.remembered) == (main, None)
    assert sub.number != main.number
    match, again = desk.sends(chat(system(), *HISTORY, DONE, NEXT))
    assert (match.remembered, again) == (main, main)


def test_a_session_id_does_not_make_two_agents_one():
    desk = Desk()
    _, main = desk.sends(chat(system(), *HISTORY))
    other = chat(system("You explore files for somebody else. " * 40), *HISTORY, DONE, NEXT)
    match, line = desk.sends(other)
    assert (match.remembered, line.number) != (main, main.number)
    assert match.remembered is None
    assert desk.sends(chat(system(), *HISTORY, DONE, NEXT))[1] is main


def test_with_more_tools_a_conversation_goes_on_and_nothing_is_put_back():
    desk = Desk()
    _, first = desk.sends(chat(system(), *HISTORY))
    more = [tool("mcp", url="string"), *TOOLS]
    match, second = desk.sends(chat(system(), *HISTORY, DONE, NEXT, tools=more))
    assert match.remembered is None
    assert (second.number, second is first) == (first.number, False)
    assert desk.sends(chat(system(), *HISTORY, DONE, NEXT))[1] is first  # the tools are gone again


def test_the_same_tools_in_another_order_are_the_same_agents():
    desk = Desk()
    _, first = desk.sends(chat(system(), *HISTORY))
    match, again = desk.sends(chat(system(), *HISTORY, DONE, NEXT, tools=TOOLS[::-1]))
    assert (match.remembered, again) == (first, first)
