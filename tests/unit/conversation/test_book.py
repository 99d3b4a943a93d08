"""Conversations are found by name or content, and never those of another client."""

from __future__ import annotations

import pytest

from slotkeeper.conversation.layout import Match, Note, Who
from slotkeeper.conversation.likeness import COMPARED, REPLIES, likeness
from slotkeeper.conversation.rules.base import carried
from unit.conversation.talks import (
    DONE,
    HISTORY,
    ME,
    NEXT,
    ROUND,
    SYSTEM,
    TASK,
    TOOLS,
    UNNAMED,
    Clients,
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


@pytest.mark.parametrize("who", [ME, UNNAMED])
def test_a_request_continues_the_conversation_of_the_one_before(who):
    clients = Clients()
    _, line = clients.sends(FIRST, who)
    match, again = clients.sends(THEN, who)
    assert (match.before, match.common) == (line, 1)
    assert again is line
    match, again = clients.sends(LATER, who)
    assert (match.before, match.common, again) == (line, 3, line)
    assert line.received is LATER
    assert len(clients.book) == 1


@pytest.mark.parametrize("other", [Who("another key/agent", ME.name), Who(ME.client, "ses_2")])
def test_clients_with_different_keys_or_session_names_never_share_a_conversation(other):
    clients = Clients()
    _, line = clients.sends(LATER)
    assert clients.book.find(other, LATER).before is None
    assert likeness(line, ME, LATER) is not None
    assert likeness(line, other, LATER) is None
    assert clients.book.find(Who("another key/agent", ME.name), LATER) == Match(before=None)


def test_requests_are_matched_by_content_if_only_one_of_them_has_a_session_name():
    clients = Clients()
    _, line = clients.sends(THEN, UNNAMED)
    match, again = clients.sends(LATER, ME)
    assert match.before is line
    assert again is line
    assert line.who == ME


def test_a_new_session_with_the_same_first_message_is_a_new_conversation():
    clients = Clients()
    _, line = clients.sends(LATER, UNNAMED)
    match, other = clients.sends(FIRST, UNNAMED)
    assert (match.before, match.sibling) == (None, line)
    assert other is not line
    match, again = clients.sends(chat(system(), TASK), UNNAMED)
    assert (match.before, match.common, again) == (other, 1, other), "a retry of its first request"
    match, _ = clients.sends(chat(system(), TASK, *ROUND, reply("I give up."), NEXT), UNNAMED)
    assert match.before is other, "its second request follows its first, not the other session"


def test_the_same_task_in_another_folder_is_not_a_retry():
    clients = Clients()
    clients.sends(FIRST, UNNAMED)
    elsewhere = chat(system(SYSTEM.replace("/home/dev/shop", "/home/dev/play")), TASK)
    assert clients.book.find(UNNAMED, elsewhere).before is None


SUNDAY = Note("The date is now Sunday.", {"date": "now Sunday"})
MAIN = Note("The branch is now main.", {"git_status": "now main"})


def test_a_branch_keeps_the_old_conversation_and_takes_over_the_notes_that_both_contain():
    clients = Clients()
    match = clients.book.find(ME, LATER)
    line = clients.book.saw(
        match,
        ME,
        received=LATER,
        sent=LATER,
        notes={1: (SUNDAY,), 5: (MAIN,)},
        now=1.0,
    )
    back = chat(system(), TASK, *ROUND, reply("I would rather not."), NEXT)
    match, branch = clients.sends(back)
    assert match.common == 3
    assert match.before is not None
    assert match.before.number == line.number
    notes = carried(back, match.before, match.common)
    assert notes == {1: (SUNDAY,)}, "the other note is not in this history"
    assert branch is not line
    assert line.received is LATER
    assert set(line.notes) == {1, 5}
    assert clients.book.find(ME, chat(system(), *HISTORY, DONE, NEXT)).before is line
    assert (
        clients.book.find(ME, chat(system(), TASK, *ROUND, reply("I would rather not."), NEXT, DONE)).before
        is branch
    )


def test_a_summary_with_the_same_session_name_continues_the_conversation():
    clients = Clients()
    _, line = clients.sends(LATER)
    after = chat(system(), user("This session is being continued from a previous conversation: the parser."))
    match, new = clients.sends(after)
    assert match.before is not None
    assert (match.before.number, match.common) == (line.number, 0)
    assert not carried(after, match.before, match.common)
    assert new is not line
    assert clients.book.find(ME, chat(system(), user("What is the time?"))).before is None, "another task"


@pytest.mark.parametrize("day", ["Sat Nov 21", "Sun Nov 22"])
def test_the_next_turn_does_not_continue_a_suggestion_request_even_if_the_date_changed(day):
    """The suggestion shares one message more, but is not the conversation."""
    clients = Clients()
    _, line = clients.sends(chat(system(), *HISTORY), UNNAMED)
    match, aside = clients.sends(chat(system(), *HISTORY, DONE, user("[SUGGESTION MODE: Suggest.]")), UNNAMED)
    assert match.before is line
    assert aside is not line
    match, _ = clients.sends(chat(system(SYSTEM.replace("Sat Nov 21", day)), *HISTORY, DONE, NEXT), UNNAMED)
    assert (match.before, match.common) == (line, 5)


def test_requests_that_share_only_a_context_message_are_different_conversations():
    clients = Clients()
    context = user("<environment_context>\n  <cwd>/home/dev/shop</cwd>\n</environment_context>")
    clients.sends(chat(system(), context, TASK, *ROUND), UNNAMED)
    clients.sends(chat(system(), context, TASK, *ROUND), ME)
    assert clients.book.find(UNNAMED, chat(system(), context, user("Something else."))).before is None
    assert clients.book.find(ME, chat(system(), context, user("Something else."))).before is None


def test_a_sibling_has_the_same_system_text_or_the_same_tools():
    clients = Clients()
    _, line = clients.sends(FIRST)
    other = Who(ME.client, "ses_2")
    assert clients.book.find(other, chat(system("Another."), user("Hi."))).sibling is line
    assert clients.book.find(other, chat(system(), user("Hi."), tools=[])).sibling is line
    assert clients.book.find(other, chat(system("Another."), user("Hi."), tools=[])).sibling is None
    assert clients.book.find(other, chat(system("Another."), user("Hi."), tools=[])).beside is line


def test_the_least_recently_used_conversation_is_evicted_first():
    clients = Clients(most=2)
    lines = [clients.sends(chat(system(), user(f"Task {n}.")), Who("key", f"{n}"))[1] for n in (1, 2)]
    clients.sends(chat(system(), user("Task 1.")), Who("key", "1"))
    clients.sends(chat(system(), user("Task 3.")), Who("key", "3"))
    found = [
        clients.book.find(Who("key", f"{n}"), chat(system(), user(f"Task {n}."))).before for n in (1, 2, 3)
    ]
    assert found[0] is lines[0]
    assert found[1] is None
    assert found[2] is not None


def test_the_latest_conversation_is_kept_even_if_it_exceeds_the_limit_of_characters():
    clients = Clients(characters=10)
    _, line = clients.sends(LATER)
    assert clients.book.find(ME, LATER).before is line


def test_an_empty_request_begins_a_conversation():
    match, empty = Clients().sends(chat(), UNNAMED)
    assert (match, empty.number) == (Match(before=None), 1)


def test_a_conversation_dropped_during_its_request_begins_again():
    clients = Clients(characters=10)  # only the latest is kept
    _, line = clients.sends(THEN)
    match = clients.book.find(ME, LATER)
    clients.sends(chat(system(), user("Something else.")))
    again = clients.book.saw(match, ME, received=LATER, sent=LATER, notes={}, now=9.0)
    assert again is not line
    clients.book.replied(line, {"role": "assistant", "content": "too late"})
    assert repr(clients.book) == f"<Conversations 1 | {again.size} of 10 characters>"
    assert {number for listed in clients.book._index.values() for number in listed} == {again.line}


def test_replies_are_stored_by_their_call_ids_and_inherited_by_branches():
    clients = Clients()
    _, line = clients.sends(THEN)
    told = reply(edit={"path": "a"})
    weight = clients.book.characters
    clients.book.replied(line, told)
    assert line.replies == {"call_edit": told}
    assert clients.book.characters > weight
    _, branch = clients.sends(chat(system(), TASK, reply("No."), NEXT))
    assert branch.replies == {}  # that reply is not in its history
    _, branch = clients.sends(chat(system(), TASK, ROUND[0], result("read", "Other."), told, NEXT))
    assert branch.replies == {"call_edit": told}


def test_characters_of_replies_are_counted_once_for_each_key_and_not_again_when_one_is_replaced():
    clients = Clients()
    _, line = clients.sends(THEN)
    for _ in range(3):
        clients.book.replied(line, reply(read={"path": "a"}, edit={"path": "b"}))
    counted = clients.book.characters
    _, again = clients.sends(THEN)  # a repeated request: all is counted afresh
    assert again.replies.keys() == {"call_read", "call_edit"}
    assert clients.book.characters == counted


def test_the_oldest_replies_are_dropped_beyond_the_limit():
    clients = Clients()
    _, line = clients.sends(THEN)
    for n in range(REPLIES + 5):
        clients.book.replied(line, {"role": "assistant", "content": f"reply {n}"})
    assert len(line.replies) == REPLIES
    assert next(iter(line.replies.values()))["content"] == "reply 5"
    assert clients.book.characters == line.size


def test_only_the_latest_of_many_conversations_with_the_same_beginning_are_compared():
    clients = Clients()
    for n in range(2 * COMPARED):
        clients.sends(chat(system(), TASK, reply(f"Answer {n}."), NEXT), Who("key", f"{n}"))
    crowded = [key for key, listed in clients.book._index.items() if len(listed) > COMPARED]
    assert crowded
    assert all(len(list(clients.book._latest([key]))) == COMPARED for key in crowded)
    match = clients.book.find(
        Who("key", "3"), chat(system(), TASK, reply("Answer 3."), NEXT, DONE, user("More."))
    )
    assert match.before is not None
    assert match.before.who.name == "3"


# -- sub-agents and tools -----------------------------------------------------------------------------------

FEW = [TOOLS[2], TOOLS[0]]  # in another order


@pytest.mark.parametrize(
    "other",
    [
        chat(system(), *HISTORY, DONE, NEXT, tools=FEW),  # Qwen Code's memory request has the history
        chat(system("You explore files for somebody else. " * 40), *HISTORY, DONE, NEXT),
    ],
    ids=["some of the tools, in another order", "another system text"],
)
def test_another_agent_with_the_same_session_id_is_a_separate_conversation(other):
    clients = Clients()
    _, main = clients.sends(chat(system(), *HISTORY))
    match, line = clients.sends(other)
    assert match.remembered is None
    assert line.number != main.number
    match, again = clients.sends(chat(system(), *HISTORY, DONE, NEXT))
    assert (match.remembered, again) == (main, main)


def test_a_request_with_added_tools_continues_the_conversation_but_restores_nothing():
    clients = Clients()
    _, first = clients.sends(chat(system(), *HISTORY))
    more = [tool("mcp", url="string"), *TOOLS]
    match, second = clients.sends(chat(system(), *HISTORY, DONE, NEXT, tools=more))
    assert match.remembered is None
    assert (second.number, second is first) == (first.number, False)
    assert clients.sends(chat(system(), *HISTORY, DONE, NEXT))[1] is first  # the tools are gone again


def test_the_same_tools_in_another_order_belong_to_the_same_agent():
    clients = Clients()
    _, first = clients.sends(chat(system(), *HISTORY))
    match, again = clients.sends(chat(system(), *HISTORY, DONE, NEXT, tools=TOOLS[::-1]))
    assert (match.remembered, again) == (first, first)
