"""Reminders that Qwen Code and Claude Code insert into messages, and later drop, change or move."""

from __future__ import annotations

from typing import Any

import pytest

from slotkeeper.api.head import Api
from slotkeeper.conversation.layout import Edit
from slotkeeper.conversation.rules.rules import Countdown, Reminders
from unit.conversation.rules.scenes import scene, turn
from unit.conversation.rules.sessions import Session, noted

Doc = dict[str, Any]


def part(text: str) -> Doc:
    return {"type": "text", "text": text}


def reminder(text: str) -> str:
    return f"<system-reminder>\n{text}\n</system-reminder>"


def today(day: str) -> str:
    return f"The current date is: {day}. Note: This is the authoritative current date."


SETUP = reminder(
    "This is the Qwen Code. We are setting up the context.\nToday's date is Saturday, November 21, 2026."
)
SATURDAY, SUNDAY = "Saturday, November 21, 2026", "Sunday, November 22, 2026"


def qwen(*behind: Doc, days: tuple[str, ...] = (), setup: str = SETUP) -> Doc:
    """Return a request whose first message has parts with reminders, then the user's question."""
    reminders = [part(setup), *(part(reminder(today(day))) for day in days)]
    first = {"role": "user", "content": [*reminders, part("Fix the cart.")]}
    return {"messages": [{"role": "system", "content": "You are Qwen."}, first, *behind]}


def sent(first: Doc, second: Doc, api: Api = Api.CHAT) -> Doc:
    """Return the second request of a session as it is sent."""
    session = Session([Reminders()], api)
    session.send(first)
    return session.send(second).doc


def test_a_reminder_that_qwen_code_drops_on_resume_is_restored():
    resumed = qwen(*turn("Next."))
    after = sent(qwen(days=(SATURDAY,)), resumed)
    assert after["messages"] == qwen(*turn("Next."), days=(SATURDAY,))["messages"]


def test_a_reminder_added_to_an_old_message_is_noted_at_the_end():
    after = sent(qwen(), qwen(*turn("Next."), days=(SUNDAY,)))
    assert after["messages"][:-1] == qwen(*turn("Next."))["messages"][:-1]
    assert noted(after["messages"][-1]["content"]) == (today(SUNDAY),)


def test_a_changed_reminder_is_restored_and_each_change_is_noted():
    session = Session([Reminders()])
    turns: tuple[Doc, ...] = ()
    told = []
    for n, day in enumerate([SATURDAY, SUNDAY, SUNDAY, SATURDAY, SATURDAY]):
        turns = (*turns, *turn(f"Turn {n}."))
        after = session.send(qwen(*turns, days=(day,))).doc
        assert after["messages"][1] == qwen(days=(SATURDAY,))["messages"][1]
        told.append(noted(after["messages"][-1]["content"]))
    assert told == [(), (today(SUNDAY),), (), (today(SATURDAY),), ()]


def test_a_changed_setup_block_of_a_session_is_noted_as_a_whole():
    other = SETUP.replace("Saturday, November 21", "Sunday, November 22")
    after = sent(qwen(), qwen(*turn("Next."), setup=other))
    assert after["messages"][1] == qwen()["messages"][1]
    (note,) = noted(after["messages"][-1]["content"])
    assert f"<system-reminder>\n{note}\n</system-reminder>" == other


# -- Claude Code -------------------------------------------------------------------------------------------

EMPTY_LIST = reminder("Your todo list is empty. Do not mention this to the user.")
LATER = {"role": "assistant", "content": [part("Done.")]}
USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "read", "input": {}}]}


def claude(*messages: Doc) -> Doc:
    return {"system": [part("You are Claude Code.")], "messages": [*messages]}


def says(*texts: str) -> Doc:
    return {"role": "user", "content": [part(text) for text in texts]}


def result(*texts: str) -> Doc:
    block = {"type": "tool_result", "tool_use_id": "c1", "content": "import os"}
    return {"role": "user", "content": [block, *(part(text) for text in texts)]}


def test_a_reminder_beside_a_result_is_restored_there_if_the_client_moves_it():
    after = sent(
        claude(says("Fix the cart."), USE, result(EMPTY_LIST)),
        claude(says("Fix the cart."), USE, result(), LATER, says("Next.", EMPTY_LIST)),
        Api.MESSAGES,
    )
    assert after["messages"] == [
        says("Fix the cart."),
        USE,
        result(EMPTY_LIST),
        LATER,
        says("Next.", EMPTY_LIST),
    ]


def test_a_reminder_inside_a_text_is_restored_inside_it():
    after = sent(
        claude(says(f"{EMPTY_LIST}\nFix the cart.")),
        claude(says("Fix the cart."), LATER, says("Next.")),
        Api.MESSAGES,
    )
    assert after["messages"] == [says(f"{EMPTY_LIST}\nFix the cart."), LATER, says("Next.")]


def test_a_new_reminder_that_is_also_elsewhere_in_the_request_is_not_noted():
    after = sent(
        claude(says("Fix the cart.")),
        claude(says(EMPTY_LIST, "Fix the cart."), LATER, says("Next.", EMPTY_LIST)),
        Api.MESSAGES,
    )
    assert after["messages"] == [says("Fix the cart."), LATER, says("Next.", EMPTY_LIST)]


def test_changed_instruction_files_are_noted_as_a_whole():
    rules = "# claudeMd\nContents of CLAUDE.md:\n\n- Test.{}\n\n# currentDate\nToday's date is 2026-11-2{}."
    now = rules.format("\n- Use csv.", 2)
    after = sent(
        claude(says(reminder(rules.format("", 1)), "Fix the cart.")),
        claude(says(reminder(now), "Fix the cart."), LATER, says("Next.")),
        Api.MESSAGES,
    )
    assert after["messages"][0] == says(reminder(rules.format("", 1)), "Fix the cart.")
    assert noted(after["messages"][2]["content"][0]["text"]) == (now,)


def test_a_token_count_beside_a_dropped_reminder_is_noted_once():
    def warned(left: int, before: str = "") -> Doc:
        return says(
            f"{before}Go.\n<system_warning>Token usage: {200 - left}/200; {left} remaining</system_warning>"
        )

    session = Session([Countdown(), Reminders()], Api.MESSAGES)
    session.send(claude(warned(190, f"{EMPTY_LIST}\n")))
    first, told = session.before.sent.messages[1].texts[0].text, []
    turns: tuple[Doc, ...] = ()
    for left in (150, 120):
        turns = (*turns, LATER, says(f"Next at {left}."))
        after = session.send(claude(warned(left), *turns)).doc
        assert after["messages"][0]["content"][0]["text"] == first
        told.append(noted(after["messages"][-1]["content"][0]["text"]))
    assert told == [
        ("<system_warning>Token usage: 50/200; 150 remaining</system_warning>",),
        ("<system_warning>Token usage: 80/200; 120 remaining</system_warning>",),
    ]


def test_a_token_count_added_to_an_earlier_message_is_noted_at_the_end():
    warning = "<system_warning>Token usage: 50/200; 150 remaining</system_warning>"
    after = sent(claude(says("Go.")), claude(says(f"Go.\n{warning}"), LATER, says("Next.")), Api.MESSAGES)
    assert after["messages"][0] == says("Go.")
    assert noted(after["messages"][2]["content"][0]["text"]) == (warning,)


# -- what is not edited ------------------------------------------------------------------------------------


def dated(day: int, doc: Doc) -> Doc:
    """Return the request with a date in the system text, which is left to another rule."""
    system = {"role": "system", "content": f"Go.\nToday's date: 2026-11-{day}"}
    return {"messages": [system, *doc["messages"][1:]]}


@pytest.mark.parametrize(
    ("now", "sent"),
    [
        (qwen(*turn(f"Next.\n{EMPTY_LIST}")), qwen()),
        (qwen(*turn("Go right.")), qwen(*turn(f"{EMPTY_LIST}\nGo left."))),
        (dated(22, qwen(*turn("Next."))), dated(21, qwen())),
    ],
    ids=["the newest message", "a message that a user rewrites", "a fact of the system text"],
)
def test_what_is_no_reminder_of_an_earlier_message_is_not_edited(now, sent):
    assert not [change for change in Reminders().changes(scene(now, sent)) if isinstance(change, Edit)]


def test_a_block_that_contains_the_end_tag_of_a_note_is_not_moved():
    def asked(*parts: str) -> tuple[Doc, ...]:
        return ({"role": "assistant", "content": "Done."}, says(*parts, "Go."), *turn("On."))

    def left(context: str) -> bool:
        block = "<environment_context>{}</environment_context>"
        session = Session([Reminders()])
        session.send(qwen(*asked(block.format("bash"))))
        now = qwen(*asked(block.format(context), EMPTY_LIST))
        return bool(session.send(now).doc["messages"][3] == now["messages"][3])

    assert not left("zsh")
    assert left("</system-reminder>")
