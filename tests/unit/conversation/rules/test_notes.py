"""Where a note is put, that it stays there, and that it is never added twice."""

from __future__ import annotations

from typing import Any

import pytest

from slotkeeper.api.head import Api
from slotkeeper.conversation.layout import Conversation, Notes, Who, edited
from slotkeeper.conversation.rules import base
from slotkeeper.conversation.rules.base import Fact, note, note_edits
from unit.conversation.rules.scenes import call, called, laid_out, result, system, user
from unit.conversation.rules.sessions import noted

Doc = dict[str, Any]

DAY = Fact("system0.0/date//0", "Current date: 2026-11-22")
OTHER_DAY = Fact("system0.0/date//0", "Current date: 2026-11-23")
FILE = Fact("system0.0/memory_file/AGENTS.md/0", "Instructions from: AGENTS.md\n- Test.")

SYSTEM, ASKED, NEXT = system("You are an agent."), user("Fix it."), user("Next.")
SAID, CALLED, RESULT = called(content="Done."), called(call("c1"), content=None), result("c1", "import os")


def chat(*messages: Doc) -> Doc:
    return {"messages": [SYSTEM, ASKED, *messages]}


def with_notes(
    doc: Doc, *facts: Fact, common: int = 0, before: Conversation | None = None, api: Api = Api.CHAT
) -> Doc:
    edits, _ = note_edits(laid_out(doc, api), before, common, facts)
    return edited(doc, edits)


def conversation(doc: Doc, told: Notes) -> Conversation:
    layout = laid_out(doc)
    return Conversation(1, Who("client"), layout, layout, 0.0, notes=told)


def noted_in(doc: Doc) -> list[int]:
    return [n for n, message in enumerate(doc["messages"]) if noted(str(message["content"]))]


def test_a_note_is_one_block_with_a_heading_and_the_latest_fact_of_each_place():
    text = note([DAY, FILE]).text
    assert text.startswith("<system-reminder>\nChanged since. This replaces what stands further up:")
    assert text.endswith(
        "\n\nCurrent date: 2026-11-22\n\nInstructions from: AGENTS.md\n- Test.\n</system-reminder>"
    )
    assert note([DAY, FILE, OTHER_DAY]) == note([OTHER_DAY, FILE])
    assert with_notes(doc := chat(SAID, NEXT)) is doc, "nothing to note"


@pytest.mark.parametrize(
    ("behind", "common", "place"),
    [
        ([], 0, 1),  # a first message
        ([SAID, NEXT], 1, 3),  # a new turn
        ([CALLED, RESULT], 1, 3),  # a tool loop: the newest result
        ([CALLED, RESULT, SAID, NEXT, CALLED, RESULT], 5, 7),
        ([CALLED, RESULT, NEXT], 1, 4),  # a user interrupts
        ([SAID, NEXT], 3, 3),  # the same request again
        ([SAID, NEXT, SAID], 3, 3),  # no user message among the new ones
    ],
)
def test_a_fact_is_noted_in_the_newest_message_that_can_carry_a_note(behind, common, place):
    doc = chat(*behind)
    told = with_notes(doc, DAY, common=common)
    assert noted_in(told) == [place]
    assert told["messages"][place]["content"] == f"{doc['messages'][place]['content']}\n\n{note([DAY]).text}"


LOOK, TOLD = f"Fix it.\n\n{note([DAY]).text}", f"import os\n\n{note([DAY]).text}"
USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "read", "input": {}}]}
USED = {"type": "tool_result", "tool_use_id": "c1"}
CALL = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1"}


def parts(*texts: str) -> Doc:
    return user([{"type": "text", "text": text} for text in texts])


@pytest.mark.parametrize(
    ("api", "before", "newest", "noted_newest"),
    [
        (Api.CHAT, [], parts("Now.", "Fix it."), parts("Now.", LOOK)),
        (Api.CHAT, [], {**ASKED, "content": ""}, {**ASKED, "content": note([DAY]).text}),
        (
            Api.MESSAGES,
            [ASKED, USE],
            user([{**USED, "content": "import os"}]),
            user([{**USED, "content": TOLD}]),
        ),
        (Api.RESPONSES, [ASKED, CALL], {**OUTPUT, "output": "import os"}, {**OUTPUT, "output": TOLD}),
    ],
    ids=["the last part", "an empty message", "anthropic result", "responses output"],
)
def test_a_note_is_appended_to_the_last_text(api, before, newest, noted_newest):
    key = "input" if api is Api.RESPONSES else "messages"
    told = with_notes({key: [*before, newest]}, DAY, common=len(before[:1]), api=api)
    assert told[key] == [*before, noted_newest]


def test_a_request_without_a_user_message_has_no_place_for_a_note():
    layout = laid_out({"messages": [SYSTEM]})
    assert base.place(layout, 0) is None
    assert note_edits(layout, None, 0, [DAY]) == ([], {})


# -- notes of earlier requests -----------------------------------------------------------------------------


def test_an_earlier_note_stays_in_its_message():
    before = conversation(chat(SAID, NEXT), {3: (note([DAY]),)})
    doc = chat(SAID, NEXT, SAID, NEXT)
    edits, kept = note_edits(laid_out(doc), before, 3, [])
    told = edited(doc, edits)
    assert told["messages"][3]["content"] == f"Next.\n\n{note([DAY]).text}"
    assert noted_in(told) == [3]
    assert kept == {3: (note([DAY]),)}


def test_a_new_note_follows_the_earlier_notes_of_its_message():
    before = conversation(chat(), {1: (note([DAY]),)})
    edits, kept = note_edits(laid_out(chat()), before, 1, [FILE])
    assert (
        edited(chat(), edits)["messages"][1]["content"]
        == f"Fix it.\n\n{note([DAY]).text}\n\n{note([FILE]).text}"
    )
    assert kept == {1: (note([DAY]), note([FILE]))}


def test_a_note_is_never_added_twice():
    before = conversation(chat(SAID, NEXT), {1: (note([DAY]),), 3: (note([FILE]),)})
    told = with_notes(chat(SAID, NEXT), common=3, before=before)
    assert with_notes(told, common=3, before=before) is told


def test_notes_of_removed_messages_are_dropped():
    before = conversation(chat(SAID, NEXT), {1: (note([DAY]),), 3: (note([FILE]),)})
    _, kept = note_edits(laid_out(chat(SAID, user("No, look first."))), before, 2, [])
    assert kept == {1: (note([DAY]),)}


def test_notes_keep_their_messages_if_a_system_message_is_added():
    before = conversation(chat(SAID, NEXT), {3: (note([DAY]),)})
    longer = {"messages": [SYSTEM, *chat(SAID, NEXT, SAID, NEXT)["messages"]]}
    told = with_notes(longer, common=3, before=before)
    assert noted_in(told) == [4]


def test_a_text_that_contains_a_reminder_tag_cannot_be_noted():
    assert base.tellable(FILE.text)
    assert not base.tellable("<system-reminder>")
    assert not base.tellable("</system-reminder>")
