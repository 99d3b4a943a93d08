"""The kind of a request, for requests in the shape of each client's real ones."""

from __future__ import annotations

import pytest

from slotkeeper.conversation.layout import Who
from slotkeeper.conversation.likeness import RequestKind, asks_for_summary
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

OLD = chat(system(), *HISTORY)
ANOTHER = Who(ME.client, "ses_2")
TITLE = "You are a title generator. You output ONLY a thread title. Nothing else."
ADVISER = "You tell whether a command is safe. Answer with yes or no."
SUMMARY = "Another language model started to solve this problem and produced a summary of it: the parser."
PLAN = "CRITICAL: Respond with text only. Summarise what was done."


ROUND_TRIP = reply(bash={"command": "ls"}), result("bash", "a\nb")
CLEARED = ROUND[0], result("read", "[Old tool result content cleared]")
SUGGEST = user("[SUGGESTION MODE: Suggest what comes next.]")
OPEN_WEBUI = "Predict 3-5 useful messages", "You are an autocompletion system.", "Generate 1-3 broad tags"


def then(*messages, text=SYSTEM, **more):
    """Return a request with the history, a reply and these messages."""
    return chat(system(text), *HISTORY, DONE, *messages, **more)


@pytest.mark.parametrize(
    ("new", "kind"),
    [
        (chat(system(), TASK, *ROUND), RequestKind.BRANCH),
        (chat(system(), *HISTORY), RequestKind.RETRY),
        (chat(system(), *HISTORY, *ROUND_TRIP), RequestKind.TOOL_ROUND_TRIP),
        (then(NEXT), RequestKind.MAIN_TURN),
        (then(NEXT, reasoning_effort="low"), RequestKind.MAIN_TURN),
        (then(user("What did we do so far?")), RequestKind.MAIN_TURN),  # a question about earlier work
        (chat(system(), TASK, *ROUND, reply("No."), NEXT), RequestKind.BRANCH),
        (then(NEXT, text=SYSTEM.replace("Sat Nov 21", "Sun Nov 22")), RequestKind.REWRITE),
        (then(NEXT, tools=TOOLS[::-1]), RequestKind.REWRITE),
        (chat(system(), TASK, *CLEARED, *HISTORY[3:]), RequestKind.REWRITE),
        (then(SUGGEST), RequestKind.SIDE),
        (then(user(PLAN)), RequestKind.COMPACTION),
        (chat(system(), *HISTORY[2:], DONE, user(PLAN)), RequestKind.COMPACTION),  # the oldest left out
        (chat(system(), TASK, user(SUMMARY)), RequestKind.COMPACTION),
        (chat(system(), user(SUMMARY)), RequestKind.COMPACTION),
        (
            chat(system(TITLE), user("Generate a title for this conversation:\n"), TASK, tools=[]),
            RequestKind.SIDE,
        ),
        (chat(system(ADVISER), user("rm -rf build"), tools=[]), RequestKind.SIDE),
        (chat(system(ADVISER), user("rm"), tools=[tool("answer", safe="boolean")]), RequestKind.SIDE),
        (chat(system("You survey."), user("Survey."), tools=TOOLS[:2]), RequestKind.COLD),  # a sub-agent
        (chat(system(), user("What is the time?")), RequestKind.COLD),
    ],
)
def test_a_request_in_a_known_conversation_gets_its_kind(new, kind):
    clients = Clients()
    clients.sends(OLD)
    assert clients.explains(new).kind is kind


@pytest.mark.parametrize(
    ("new", "kind"),
    [
        (chat(system(), TASK), RequestKind.COLD),
        (chat(system(TITLE), TASK, tools=[]), RequestKind.SIDE),
        (chat(system(ADVISER), TASK, tools=[]), RequestKind.COLD),  # no conversation is beside it yet
    ],
)
def test_the_first_request_of_a_client_gets_its_kind(new, kind):
    assert Clients().explains(new, UNNAMED).kind is kind


@pytest.mark.parametrize("task", OPEN_WEBUI)
def test_a_side_request_of_open_webui_is_one_before_any_chat_is_known(task):
    new = chat(user(f"### Task:\n{task}\n### Chat History:\nUSER: What is the time?"), tools=[])
    assert Clients().explains(new, UNNAMED).kind is RequestKind.SIDE


def test_a_conversation_continues_after_a_summary():
    clients = Clients()
    clients.sends(OLD)
    summed = (TASK, user(SUMMARY))
    assert clients.explains(chat(system(), *summed)).kind is RequestKind.COMPACTION
    assert clients.explains(chat(system(), *summed, *ROUND)).kind is RequestKind.TOOL_ROUND_TRIP
    assert clients.explains(chat(system(), *summed, *ROUND, DONE, NEXT)).kind is RequestKind.MAIN_TURN


def test_a_summary_is_recognised_without_a_session_name():
    clients = Clients()
    clients.sends(OLD, UNNAMED)
    new = chat(
        system(), user("<system>Previous context has been compacted. Here is a summary.</system>"), NEXT
    )
    assert clients.explains(new, UNNAMED).kind is RequestKind.COMPACTION


def test_a_request_that_continues_a_side_request_is_a_side_request():
    clients = Clients()
    clients.sends(OLD)
    first = (user("Is this safe: ls"), reply("Yes."))
    aside = Who(ME.client)
    for messages in (first[:1], (*first, user("And rm?"))):
        new = chat(system(ADVISER), *messages, tools=[])
        assert clients.explains(new, aside).kind is RequestKind.SIDE
    assert clients.explains(chat(system(), *HISTORY, DONE, NEXT)).kind is RequestKind.MAIN_TURN


def test_a_user_message_that_quotes_the_phrases_of_side_requests_is_a_main_turn():
    clients = Clients()
    clients.sends(OLD)
    asked = user('Why does it say "CRITICAL: Respond with text only" and [SUGGESTION MODE there?')
    new = chat(system(), *HISTORY, DONE, asked)
    assert clients.explains(new).kind is RequestKind.MAIN_TURN
    assert not asks_for_summary(new)


def test_a_tool_result_that_quotes_a_summary_is_a_tool_round_trip():
    found = result("bash", "Another language model started to solve this problem")
    clients = Clients()
    clients.sends(OLD)
    new = chat(system(), *HISTORY, reply(bash={"command": "cat notes"}), found)
    assert clients.explains(new).kind is RequestKind.TOOL_ROUND_TRIP
