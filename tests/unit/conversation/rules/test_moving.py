"""Changed facts in the system text of each client: restored there, and noted at the end."""

from __future__ import annotations

from typing import Any

import pytest

from slotkeeper.api.head import Api
from slotkeeper.conversation.layout import Edit
from slotkeeper.conversation.rules.base import Fact
from slotkeeper.conversation.rules.rules import (
    Clock,
    Countdown,
    Date,
    Environment,
    GitStatus,
    MemoryFile,
    Moving,
    WorkingDirectory,
)
from unit.conversation.preambles import AIDER, CLIENTS, KIMI, OPENCODE, PI
from unit.conversation.rules.scenes import call, called, result, scene, system, turn, user
from unit.conversation.rules.sessions import Session, noted

Doc = dict[str, Any]

FROM_FILE = "Instructions from: /srv/shop/AGENTS.md\n"
ISO = "The current date and time in ISO format is "
PROJECT = "Project-specific instructions and guidelines:\n\n## /srv/shop/AGENTS.md\n\n# House rules\n\n"
# client, rule, a part of its system text, and what stands there later
CHANGES = [
    ("opencode", Date(), "Today's date: Sat Nov 21 2026", "Today's date: Sun Nov 22 2026"),
    ("opencode", MemoryFile(), f"{FROM_FILE}# House rules", f"{FROM_FILE}# New rules"),
    ("pi", Date(), "Current date: 2026-11-21", "Current date: 2026-11-22"),
    ("pi", MemoryFile(), f"{PROJECT}- Write tests.", f"{PROJECT}- Write tests.\n- Use csv."),
    ("continue", Date(), "Today's date: 2026-11-21", "Today's date: 2026-11-22"),
    (
        "continue",
        GitStatus(),
        "Note this.\n\nM shop/cart.py\n</context>",
        "Note this.\n\n(clean)\n</context>",
    ),
    ("mistral-vibe", Date(), "Today's date is 2026-11-21 (Saturday)", "Today's date is 2026-11-22 (Sunday)"),
    ("mistral-vibe", GitStatus(), "Current branch: main", "Current branch: fix-cart"),
    (
        "qwen-code",
        GitStatus(),
        "git: Status:\ngit: M shop/cart.py",
        "git: Status:\ngit: (clean)\ngit: ?? new.py",
    ),
    (
        "kimi-cli",
        Clock(),
        f"{ISO}`2026-11-21T08:15:30.250000+00:00`",
        f"{ISO}`2026-11-21T08:16:00.500000+00:00`",
    ),
    ("kimi-cli", Environment(), "```\n├── shop/\n└── README.md\n```", "```\n├── new.py\n└── README.md\n```"),
    ("cline", Date(), "Date: 11/21/2026", "Date: 11/22/2026"),
    ("cline", WorkingDirectory(), "Working Directory: /srv/shop", "Working Directory: /srv/other"),
    ("aider", Date(), "Current date: 2026-11-21", "Current date: 2026-11-22"),
    ("claude-code", GitStatus(), "Status:\nM shop/cart.py\n?? shop/new.py", "Status:\n(clean)"),
]
RULES = [rule() for rule in Moving.__subclasses__()]


def pi(day: str = "2026-11-21", more: str = "") -> str:
    return PI.replace("2026-11-21", day).replace("- Write tests.", f"- Write tests.{more}")


def aider(day: str) -> str:
    return AIDER.replace("2026-11-21", day)


def kimi(second: str) -> str:
    return KIMI.replace("30.250000", second)


def chat(text: str, *behind: Doc) -> Doc:
    return {"model": "m", "messages": [system(text), user("Fix the cart."), *behind]}


def system_of(doc: Doc) -> str:
    return doc["messages"][0]["content"]


def newest(doc: Doc) -> str:
    return doc["messages"][-1]["content"]


@pytest.mark.parametrize(
    ("client", "rule", "was", "now"), CHANGES, ids=[f"{client}-{rule.name}" for client, rule, *_ in CHANGES]
)
def test_a_changed_fact_keeps_its_first_value_and_the_newest_message_notes_the_new_one(
    client, rule, was, now
):
    text = CLIENTS[client]
    assert was in text
    session, body, later = Session([rule]), chat(text), chat(text.replace(was, now), *turn("And the till."))
    assert session.send(body).doc is body
    after = session.send(later).doc
    assert system_of(after) == text
    assert newest(after).startswith("And the till.\n\n<system-reminder>\n")
    (note,) = noted(newest(after))
    assert now in note
    assert after["messages"][1:-1] == later["messages"][1:-1]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_leaves_other_facts_alone(rule):
    session = Session([rule])
    session.send(chat(pi()))
    after = system_of(session.send(chat(pi("2026-11-22", "\n- Use csv."), *turn("Next."))).doc)
    assert after == pi(
        "2026-11-21" if rule.name == "date" else "2026-11-22",
        "" if rule.name == "memory_file" else "\n- Use csv.",
    )


def test_facts_of_several_rules_share_one_note():
    session = Session([Date(), MemoryFile(), GitStatus()])
    session.send(chat(pi()))
    after = session.send(chat(pi("2026-11-22", "\n- Use csv."), *turn("Next."))).doc
    assert system_of(after) == pi()
    (note,) = noted(newest(after))
    assert "Current date: 2026-11-22" in note
    assert "- Use csv." in note


def test_a_moved_fact_is_noted_once_and_the_note_stays():
    session = Session([Date()])
    session.send(chat(aider("2026-11-21")))
    system = aider("2026-11-22")
    session.send(chat(system, *turn("Next.")))
    after = session.send(chat(system, *turn("Next."), *turn("More."))).doc
    assert [len(noted(message["content"])) for message in after["messages"]] == [0, 0, 0, 1, 0, 0]


def test_each_change_is_noted_and_so_is_a_change_back_to_the_first_value():
    session = Session([Date()])
    turns: tuple[Doc, ...] = ()
    told = []
    for n, day in enumerate(
        ["2026-11-21", "2026-11-22", "2026-11-22", "2026-11-23", "2026-11-21", "2026-11-21"]
    ):
        turns = (*turns, *turn(f"Turn {n}."))
        after = session.send(chat(aider(day), *turns)).doc
        assert system_of(after) == aider("2026-11-21")
        told.append([note[-10:] for note in noted(newest(after))])
    assert told == [[], ["2026-11-22"], [], ["2026-11-23"], ["2026-11-21"], []]
    assert sum(len(noted(message["content"])) for message in after["messages"]) == 3


def test_in_a_tool_loop_a_change_is_noted_behind_the_newest_result():
    session = Session([Clock()])
    session.send(chat(kimi("20")))
    after = session.send(chat(kimi("29"), called(call("c1")), result("c1"))).doc
    assert after["messages"][1]["content"] == "Fix the cart."
    assert len(noted(after["messages"][3]["content"])) == 1


def test_anthropic_system_blocks_are_restored_one_by_one():
    def body(date: str, *behind: Doc) -> Doc:
        blocks = [{"type": "text", "text": text} for text in ("You are Claude Code.", aider(date))]
        return {"system": blocks, "messages": [{"role": "user", "content": "Fix it."}, *behind]}

    session = Session([Date()], Api.MESSAGES)
    session.send(body("2026-11-21"))
    after = session.send(body("2026-11-22", *turn("Next."))).doc
    assert after["system"] == body("2026-11-21")["system"]
    assert len(noted(newest(after))) == 1


def test_a_block_in_the_first_message_of_codex_is_restored():
    def item(role: str, text: str) -> Doc:
        kind = "output_text" if role == "assistant" else "input_text"
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    def body(date: str, rules: str, *behind: Doc) -> Doc:
        context = f"<environment_context>\n  <current_date>{date}</current_date>\n</environment_context>"
        files = f"# AGENTS.md instructions for /srv/shop\n\n<INSTRUCTIONS>\n{rules}\n</INSTRUCTIONS>"
        first = [item("user", files), item("user", context), item("user", "Fix it.")]
        return {"instructions": "You are Codex.", "input": [*first, *behind]}

    session = Session([Environment(), MemoryFile()], Api.RESPONSES)
    session.send(body("2026-11-21", "- Test."))
    behind = item("assistant", "Done."), item("user", "Next.")
    after = session.send(body("2026-11-22", "- Test.\n- Use csv.", *behind)).doc
    assert after["input"][:-1] == body("2026-11-21", "- Test.", *behind)["input"][:-1]
    (note,) = noted(after["input"][-1]["content"][0]["text"])
    assert "<current_date>2026-11-22</current_date>" in note
    assert "- Use csv." in note


def test_a_token_count_in_an_earlier_message_keeps_its_first_value():
    def warned(left: int) -> Doc:
        warning = f"<system_warning>Token usage: 9/200; {left} remaining</system_warning>"
        return {"role": "user", "content": f"Go on.\n{warning}"}

    session = Session([Countdown()])
    session.send(chat("You are Claude.", warned(191)))
    after = session.send(chat("You are Claude.", warned(150), *turn("Next."))).doc
    assert after["messages"][2] == warned(191)
    assert noted(newest(after)) == ("<system_warning>Token usage: 9/200; 150 remaining</system_warning>",)


def test_the_memories_that_a_program_recalls_for_each_question_are_told_at_the_end():
    def recalled(*memories: str) -> str:
        return "\n".join(("You help.", "<memory_context>", *memories, "</memory_context>"))

    session = Session([MemoryFile()])
    session.send(chat(recalled("- has a cat")))
    after = session.send(chat(recalled("- lives in Bern"), *turn("Next."))).doc
    assert after["messages"][0]["content"] == recalled("- has a cat")
    (note,) = noted(newest(after))
    assert "- lives in Bern" in note
    assert "- has a cat" not in note


# -- what is not edited ------------------------------------------------------------------------------------


def changes(rule: Moving, now: Doc, sent: Doc | None) -> list[Edit | Fact]:
    return [*rule.changes(scene(now, sent))]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_new_conversation_is_not_edited(rule):
    assert changes(rule, chat(OPENCODE), None) == []


def test_nothing_is_restored_if_the_system_text_changed_otherwise():
    later = "You are somebody else.\n" + aider("2026-11-22")
    assert changes(Date(), chat(later, *turn("Next.")), chat(aider("2026-11-21"))) == []


def test_an_added_memory_file_is_not_moved():
    first = "Instructions from: /srv/AGENTS.md\n- Test."
    later = f"{first}\nInstructions from: /srv/shop/AGENTS.md\n- Use csv."
    assert changes(MemoryFile(), chat(later, *turn("Next.")), chat(first)) == []


def test_a_memory_file_that_contains_the_end_tag_of_a_note_is_not_moved():
    first = "Instructions from: /srv/AGENTS.md\n- Test."
    assert changes(MemoryFile(), chat(first + "\n</system-reminder>", *turn("Next.")), chat(first)) == []


def test_a_date_that_a_user_types_is_not_edited():
    first, later = (chat("You are pi.", *turn(f"Current date: 2026-11-{day}")) for day in (21, 22))
    assert changes(Date(), later, first) == []


def test_nothing_is_moved_if_there_is_no_user_message():
    first, later = ({"messages": chat(aider(day))["messages"][:1]} for day in ("2026-11-21", "2026-11-22"))
    assert changes(Date(), later, first) == []
