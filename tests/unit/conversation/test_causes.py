"""Where a request diverges from the previous one, why, what that costs, and the rule that undoes it."""

from __future__ import annotations

from copy import deepcopy

import pytest

from slotkeeper.api.head import Api
from slotkeeper.api.request import lay_out
from slotkeeper.conversation.causes import explain, of_template
from slotkeeper.conversation.divergence import (
    CAUSES,
    EXCERPT,
    Cause,
    common_start,
    first_difference,
    length,
    parted,
)
from slotkeeper.conversation.layout import Section, Who
from slotkeeper.conversation.likeness import RequestKind
from slotkeeper.conversation.rules.base import RuleName
from unit.conversation.talks import (
    DONE,
    HISTORY,
    ME,
    NEXT,
    ROUND,
    SECOND,
    SYSTEM,
    TASK,
    TOOLS,
    UNNAMED,
    Clients,
    chat,
    explained,
    reply,
    result,
    system,
    tool,
    user,
)

OLD = chat(system(), *HISTORY)
REST = (DONE, NEXT)


def reversed_keys(schema):
    """Return the same tool with its keys in reverse order."""
    if isinstance(schema, dict):
        return {key: reversed_keys(value) for key, value in reversed(schema.items())}
    return schema


def with_id(message, new):
    message = deepcopy(message)
    if "tool_call_id" in message:
        message["tool_call_id"] = new
    for call in message.get("tool_calls", ()):
        call["id"] = new
    return message


def then(*messages, **more):
    """Return a request with these messages and the next turn."""
    return chat(system(), *messages, *REST, **more)


def edited_system(old, new):
    assert old in SYSTEM
    return chat(system(SYSTEM.replace(old, new)), *HISTORY, *REST)


ARGUMENTS = {"path": "src/parser.py"}
CLEARED = result("read", "[Old tool result content cleared]")
REMINDER = user("<system-reminder>\nBe quick.\n</system-reminder>")
RESUMED = user("This session is being continued from a previous conversation.")
OTHER_BASH, EDITED_BASH = [*TOOLS[:2], tool("web")], [*TOOLS[:2], tool("bash", line="string")]
HM, LOOKED = (
    reply(reasoning="Hm.", read=ARGUMENTS),
    reply(reasoning="Look first.", read='{"path":"src/parser.py"}'),
)


@pytest.mark.parametrize(
    ("new", "cause", "rule"),
    [
        (edited_system("Sat Nov 21", "Sun Nov 22"), Cause.DATE, RuleName.DATE),
        (edited_system("directory: /home/dev/shop", "directory: /srv/a"), Cause.CWD, RuleName.CWD),
        (edited_system("edits code", "writes code"), Cause.SYSTEM_EDITED, RuleName.REFRESHED_CONTEXT),
        (edited_system("house. Rules", "house.  Rules"), Cause.WHITESPACE, RuleName.REFRESHED_CONTEXT),
        (edited_system(SYSTEM, SYSTEM + "\n\n"), Cause.WHITESPACE, RuleName.TRAILING_WHITESPACE),
        (then(*HISTORY, tools=TOOLS[::-1]), Cause.TOOL_ORDER, RuleName.TOOL_ORDER),
        (then(*HISTORY, tools=[*map(reversed_keys, TOOLS)]), Cause.KEY_ORDER, RuleName.SCHEMA_KEYS),
        (then(*HISTORY, tools=[*TOOLS, tool("web", url="string")]), Cause.TOOL_ADDED, None),
        (then(*HISTORY, tools=TOOLS[1:]), Cause.TOOL_REMOVED, None),
        (then(*HISTORY, tools=[]), Cause.SIDE_QUESTION, RuleName.SIDE_QUESTION),
        (then(*HISTORY, tools=OTHER_BASH), Cause.TOOL_EDITED, None),
        (then(*HISTORY, tools=EDITED_BASH), Cause.TOOL_EDITED, None),
        (then(*HISTORY, tool_choice="none"), Cause.OPTIONS, None),
        (then(TASK, reply(read=ARGUMENTS), *HISTORY[2:]), Cause.REASONING_DROPPED, RuleName.REASONING),
        (then(TASK, HM, *HISTORY[2:]), Cause.REASONING_EDITED, RuleName.REASONING),
        (then(TASK, LOOKED, *HISTORY[2:]), Cause.CALL_RERENDERED, RuleName.TOOL_CALLS),
        (then(TASK, *(with_id(m, "call_9") for m in ROUND), *SECOND), Cause.CALL_IDS, RuleName.CALL_IDS),
        (then(TASK, ROUND[0], CLEARED, *SECOND), Cause.RESULT_PRUNED, RuleName.PRUNED_RESULTS),
        (then(TASK, ROUND[0], result("read", "Other."), *SECOND), Cause.MESSAGE_EDITED, None),
        (then(TASK, user("By the way."), *HISTORY[1:]), Cause.MESSAGE_INSERTED, None),
        (then(TASK, *SECOND), Cause.MESSAGE_REMOVED, None),
        (then(TASK, REMINDER, *HISTORY[1:]), Cause.REMINDER_MOVED, RuleName.REMINDERS),
        (chat(system(), TASK, RESUMED, *SECOND), Cause.HISTORY_REPLACED, None),
    ],
)
def test_the_cause_of_a_divergence_and_its_rule_are_found(new, cause, rule):
    found = explained(OLD, new)
    assert (found.cause, found.rule) == (cause, rule)


GIT = (
    "gitStatus: This is the git status at the start of the conversation.\n\nCurrent branch: main\n\nStatus:\n"
)
ISO = "The current date and time in ISO format is "
FILE = "Instructions from: /home/dev/shop/AGENTS.md\nUse tabs."
STAMP = "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch="
MOMENTS = "`2026-11-21T03:40:20.761438+00:00`.", "`2026-11-21T03:41:07.006276+00:00`."
IDS = "f81d4fae-7dec-11d0-a765-00a0c91e6bf6", "0b5c1d2e-7dec-11d0-a765-00a0c91e6bf7"


@pytest.mark.parametrize(
    ("before", "after", "cause", "known"),
    [
        ("Today's date: 2026-11-21", "Today's date: 2026-11-22", Cause.DATE, True),
        (GIT + "(clean)\n", GIT + "M src/parser.py\n", Cause.GIT_STATUS, True),
        (ISO + MOMENTS[0], ISO + MOMENTS[1], Cause.CLOCK, True),
        (FILE, f"{FILE}\nUse the csv module.", Cause.MEMORY_FILE, True),
        (f"{STAMP}a51f5;", f"{STAMP}00b17;", Cause.NONCE, True),
        ("as of 2026-11-21, the rules", "as of 2026-11-22, the rules", Cause.DATE, False),
        ("it is 10:21 by the wall", "it is 10:22 by the wall", Cause.CLOCK, False),
        ("files in /home/dev/a are", "files in /home/dev/b are", Cause.CWD, False),
        (f"run {IDS[0]} of", f"run {IDS[1]} of", Cause.NONCE, False),
        ("there are 120 tokens left", "there are 95 tokens left", Cause.COUNTDOWN, False),
        ("be kind to all of them", "be stern to all of them", Cause.SYSTEM_EDITED, False),
    ],
)
def test_a_changed_value_has_a_cause_and_a_rule_of_its_own_only_if_known_words_are_around_it(
    before, after, cause, known
):
    rest = "\n\n" + SYSTEM if known else " and so on, for every one.\n" + SYSTEM
    found = explained(chat(system(before + rest), *HISTORY), chat(system(after + rest), *HISTORY, *REST))
    rule = CAUSES[cause].rule if known else RuleName.REFRESHED_CONTEXT
    assert (found.cause, found.rule) == (cause, rule)


def test_a_changed_folder_in_a_tool_description_has_a_cause_but_no_rule():
    here, there = deepcopy(TOOLS), deepcopy(TOOLS)
    for tools, path in ((here, "/home/dev/a"), (there, "/home/dev/b")):
        tools[2]["function"]["description"] = f"Run a command in {path}, which is where you are already."
    found = explained(chat(system(), *HISTORY, tools=here), chat(system(), *HISTORY, *REST, tools=there))
    assert (found.cause, found.rule) == (Cause.CWD, None)


def test_refreshed_or_moved_files_of_a_client_are_the_cause_of_a_divergence():
    added = "I have *added these files to the chat* so you can go ahead and edit them.\n\n"
    old = chat(system(), TASK, DONE, user(added + "a = 1"), user("Go."), tools=[])
    new = chat(system(), TASK, DONE, user(added + "a = 2"), user("Go."), DONE, NEXT, tools=[])
    assert explained(old, new).cause is Cause.FILE_REFRESHED
    behind = chat(system(), TASK, DONE, user("Go."), DONE, user(added + "a = 1"), NEXT, tools=[])
    assert explained(old, behind).cause is Cause.FILE_REFRESHED


def test_arguments_with_reordered_keys_are_a_rerendered_call():
    def laid_out(given):
        use = {"type": "tool_use", "id": "t1", "name": "edit", "input": given}
        found = {"type": "tool_result", "tool_use_id": "t1", "content": "Written."}
        messages = [TASK, {"role": "assistant", "content": [use]}, {"role": "user", "content": [found]}]
        return lay_out(Api.MESSAGES, {"system": SYSTEM, "messages": messages})

    found = explained(laid_out({"path": "a", "new": "b"}), laid_out({"new": "b", "path": "a"}))
    assert (found.cause, found.rule) == (Cause.CALL_RERENDERED, RuleName.TOOL_CALLS)


def test_a_reasoning_item_that_is_left_out_is_dropped_reasoning():
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Fix it."}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Look first."}], "summary": []},
        {"type": "function_call", "call_id": "1", "name": "read", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "text"},
    ]
    old, new = (lay_out(Api.RESPONSES, {"input": given}) for given in (items, [items[0], *items[2:]]))
    found = explained(old, new)
    assert (found.cause, found.rule) == (Cause.REASONING_DROPPED, RuleName.REASONING)


@pytest.mark.parametrize(
    ("new", "cause"),
    [
        (chat(system(), user("What is the time?")), Cause.ANOTHER_TASK),
        (chat(system(SYSTEM.replace("Nov 21", "Nov 23")), user("Hi.")), Cause.DATE),
        (chat(system(SYSTEM[:-20]), user("Hi.")), Cause.SYSTEM_EDITED),
        (chat(system("You survey."), user("Survey."), tools=TOOLS[:2]), Cause.OTHER_CONVERSATION),
        (chat(system("You survey."), user("Survey.")), Cause.OTHER_CONVERSATION),
    ],
)
def test_a_divergence_between_two_sessions_has_no_rule(new, cause):
    clients = Clients()
    clients.sends(OLD)
    found = clients.explains(new, Who(ME.client, "ses_2"))
    assert (found.kind, found.cause, found.rule) == (RequestKind.COLD, cause, None)


def test_tokens_that_diverge_in_an_equal_history_are_caused_by_the_chat_template():
    clients = Clients()
    clients.sends(OLD)
    new = chat(system(), *HISTORY, *REST)
    assert explain(clients.book.find(ME, new), new).cause is None
    assert of_template(OLD) is Cause.TEMPLATE_STRIPS_REASONING
    assert of_template(chat(system(), TASK)) is Cause.TEMPLATE_RERENDERS


def test_every_cause_has_a_description_of_its_own():
    assert set(CAUSES) == set(Cause)
    assert len({seen.what for seen in CAUSES.values()}) == len(Cause)


def test_an_empty_message_counts_in_the_place_of_a_divergence():
    """The next part of the old request is in a later message, which the new request does not have."""
    old, new = chat(system(), TASK, reply(), NEXT), chat(system(), TASK, result("read", "text"))
    found = explained(old, new)
    assert found.divergence is not None
    assert found.divergence.message == 2
    assert found.cause is Cause.MESSAGE_EDITED


# -- the place -----------------------------------------------------------------------------------------


def test_a_divergence_reports_its_place_and_its_cost():
    place = explained(OLD, edited_system("Sat Nov 21", "Sun Nov 22")).divergence
    assert place is not None
    assert (place.section, place.message, place.path) == (Section.SYSTEM, 0, ("messages", 0, "content"))
    assert place.offset == SYSTEM.index("at Nov 21")
    assert "Sat Nov 21" in place.before
    assert "Sun Nov 22" in place.after
    assert len(place.before) <= EXCERPT
    behind = SYSTEM.index("</env>")
    tools = length(chat())
    assert length(OLD) - behind - tools - 20 <= place.lost <= length(OLD) - behind - tools + 20


ANSWERED = reply("Well.", "Look first.", read=ARGUMENTS)
OTHER_FILE = reply(reasoning="Look first.", read={"path": "x"})


@pytest.mark.parametrize(
    ("new", "section", "message"),
    [
        (then(*HISTORY, tools=TOOLS[1:]), Section.TOOLS, None),
        (chat(system(), TASK, reply(read=ARGUMENTS), *HISTORY[2:]), Section.REASONING, 2),
        (chat(system(), TASK, ANSWERED), Section.REPLY, 2),
        (chat(system(), TASK, OTHER_FILE, *HISTORY[2:]), Section.CALL, 2),
        (chat(system(), TASK, ROUND[0], result("read", "y"), *HISTORY[3:]), Section.RESULT, 3),
        (chat(system(), user("Another."), *HISTORY[1:]), Section.USER, 1),
    ],
)
def test_the_divergence_is_the_first_difference_in_the_order_of_templates(new, section, message):
    place = parted(OLD, new)
    assert place is not None
    assert (place.section, place.message) == (section, message)


@pytest.mark.parametrize(
    "new",
    [
        OLD,
        chat(system(), *HISTORY),
        chat(system(), *HISTORY, *REST),
        chat(system(), TASK, *ROUND),  # it ends earlier
    ],
)
def test_an_extended_history_does_not_diverge(new):
    assert parted(OLD, new) is None


def test_the_division_of_a_text_into_parts_and_cache_marks_cause_no_divergence():
    marked = {"type": "text", "text": "One.", "cache_control": {"type": "ephemeral"}}
    old = chat(system(), user([marked, {"type": "text", "text": "Two."}]))
    new = chat(system(), user("One.\nTwo."), DONE, NEXT)
    assert parted(old, new) is None
    assert first_difference(old, new) is None


def test_an_inserted_message_makes_everything_behind_it_lost():
    place = explained(OLD, chat(system(), TASK, user("By the way."), *HISTORY[1:], *REST), UNNAMED).divergence
    assert place is not None
    assert place.lost == length(OLD) - length(chat(system(), TASK))


def test_common_start_counts_equal_leading_characters():
    for one, other, count in [("", "", 0), ("a", "", 0), ("abc", "abd", 2), ("ab", "abc", 2)]:
        assert common_start(one, other) == common_start(other, one) == count
    text = "x" * 100_000
    for n in (0, 1, 65_535, 99_999):
        assert common_start(text, text[:n] + "y" + text) == n


def image(data, text=None):
    """Return a message with an image, and a question about it."""
    shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    return user([shown, *([{"type": "text", "text": text}] if text else [])])


@pytest.mark.parametrize("question", [None, "What is this?"])
@pytest.mark.parametrize(
    ("rest", "cause"),
    [((), Cause.ANOTHER_TASK), ((reply("A cat."), user("Sure?")), Cause.MESSAGE_EDITED)],
)
def test_another_image_with_the_same_text_is_another_message(question, rest, cause):
    old, new = (chat(system(), image(data, question), *rest) for data in ("AAAA", "BBBB"))
    divergence = parted(old, new)
    assert (divergence.section, divergence.message) == (Section.USER, 1)
    assert explained(old, new).cause is cause


EMPTY = {"type": "text", "text": ""}


@pytest.mark.parametrize(
    ("before", "after"),
    [(user(""), reply("")), (user([EMPTY, EMPTY]), user([EMPTY]))],
    ids=["another role", "fewer empty parts"],
)
def test_last_messages_that_differ_without_any_text_do_not_diverge(before, after):
    old, new = chat(system(), TASK, before), chat(system(), TASK, after)
    assert first_difference(old, new) == 2
    assert parted(old, new) is None


def test_arguments_that_are_nested_without_end_are_compared_as_text():
    deep = "[" * 5000
    old, new = (chat(system(), TASK, reply(edit=f"{deep}{blank}"), NEXT) for blank in ("", " "))
    assert explained(old, new).cause is Cause.CALL_RERENDERED
