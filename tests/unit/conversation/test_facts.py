"""Facts that clients insert into texts are found; sentences that people write are not mistaken for them."""

from __future__ import annotations

import itertools

import pytest

from slotkeeper.conversation import layout as module
from slotkeeper.conversation.layout import FoundFact, Section, Text, facts
from slotkeeper.conversation.phrases import FactKind
from unit.conversation.preambles import CLIENTS, OPENCODE, PI, VIBE

ENVIRONMENT_CONTEXT = """<environment_context>
  <cwd>/srv/shop</cwd>
  <current_date>2026-11-21</current_date>
</environment_context>"""

FACTS = {
    "opencode": [
        ("cwd", "/srv/shop"),
        ("cwd", "/srv/shop"),
        ("environment", "yes"),
        ("environment", "linux"),
        ("date", "Sat Nov 21 2026"),
        ("memory_file", "# House rules\n\n- Today's date: is no date here."),
    ],
    "pi": [("memory_file", "# House rules\n\n- Write tests."), ("date", "2026-11-21"), ("cwd", "/srv/shop")],
    "cline": [
        ("environment", "linux"),
        ("date", "11/21/2026"),
        ("environment", "Terminal Shell"),
        ("cwd", "/srv/shop"),
        ("memory_file", "# House rules\n- Write tests."),
    ],
    "continue": [
        ("cwd", "/srv/shop"),
        ("environment", "true"),
        ("environment", "linux"),
        ("date", "2026-11-21"),
        (
            "git_status",
            "This is the git status at the start of the conversation. Note this.\n\nM shop/cart.py",
        ),
        ("memory_file", "# House rules"),
    ],
    "mistral-vibe": [
        ("date", "2026-11-21 (Saturday)"),
        ("cwd", "/srv/shop"),
        (
            "git_status",
            (
                "Current branch: main\nMain branch (you will usually use this for PRs): main\n"
                "Recent commits:\n0a1b2c3 Tidy up\n4d5e6f7 Begin"
            ),
        ),
        ("memory_file", "# House rules"),
    ],
    "kimi-cli": [
        ("clock", "`2026-11-21T08:15:30.250000+00:00`"),
        ("cwd", "/srv/shop"),
        ("environment", "├── shop/\n└── README.md"),
        ("memory_file", "# House rules"),
    ],
    "qwen-code": [
        ("memory_file", "# House rules"),
        (
            "git_status",
            (
                "git: Current branch: main\ngit: Status:\ngit: M shop/cart.py\n"
                "git: Recent commits:\ngit: 0a1b2c3 Tidy up"
            ),
        ),
    ],
    "aider": [("environment", "Linux-6.12"), ("environment", "SHELL=/bin/bash"), ("date", "2026-11-21")],
    "claude-code": [
        ("nonce", "cc_version=2.1; cch=a1b2c;"),
        ("cwd", "/srv/shop"),
        ("environment", "Yes"),
        ("environment", "linux"),
        ("environment", "Linux 6.8"),
        ("date", "2026-11-21"),
        (
            "git_status",
            (
                "Current branch: main\n\nMain branch (you will usually use this for PRs): main\n\n"
                "Status:\nM shop/cart.py\n?? shop/new.py\n\n"
                "Recent commits:\n0a1b2c3 Tidy up\n4d5e6f7 Begin"
            ),
        ),
        ("countdown", "200000"),
    ],
}

TYPED = [
    "Today's date is Saturday, November 21, 2026, isn't it?",
    "Today's date: 2026-11-21",
    "Working directory: /srv/shop",
    "Instructions from: my boss\nwork harder",
    "Contents of AGENTS.md:\n\nnothing",
    "gitStatus: This is the git status at the start of the conversation.\nCurrent branch: main",
    "What does a <system-reminder> do, and where is its </system-reminder>?",
    "<system-reminder> is a tag that is never closed",
    "Explain <environment_context>x</environment_context> to me.",
]


def kinds_and_values(text: str, *, authored: bool = False) -> list[tuple[str, str]]:
    return [(fact.kind.value, fact.value) for fact in facts(text, authored=authored)]


@pytest.mark.parametrize("client", CLIENTS)
def test_the_changing_facts_in_the_system_text_of_each_client_are_found_in_order(client):
    text = CLIENTS[client]
    assert kinds_and_values(text) == FACTS[client]
    given = facts(text)
    assert all(fact.value in text[fact.start : fact.end] for fact in given)
    assert all(one.end <= other.start for one, other in itertools.pairwise(given))


def test_a_fact_spans_only_the_phrase_that_states_it():
    (date,) = (fact for fact in facts(VIBE) if fact.kind is FactKind.DATE)
    assert VIBE[date.start : date.end] == "Today's date is 2026-11-21 (Saturday)"


def test_the_label_of_a_memory_file_fact_is_the_name_of_the_file():
    (file,) = (fact for fact in facts(OPENCODE) if fact.kind is FactKind.MEMORY_FILE)
    assert file.label == "/srv/shop/AGENTS.md"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (ENVIRONMENT_CONTEXT, FactKind.ENVIRONMENT),
        (
            "<environment_details>\n# Current Time\n11/21/2026, 3:40:00 AM\n</environment_details>",
            "environment",
        ),
        ("<system_warning>Token usage: 12345/200000; 187655 remaining</system_warning>", FactKind.COUNTDOWN),
        (
            "# AGENTS.md instructions for /srv/shop\n\n<INSTRUCTIONS>\n- Write tests.\n</INSTRUCTIONS>",
            "memory_file",
        ),
        ("<system-reminder>\nToday's date is Saturday, November 21, 2026.\n</system-reminder>", "reminder"),
    ],
)
def test_blocks_that_client_programs_insert_are_found_in_user_messages(text, kind):
    (fact,) = facts(text, authored=True)
    assert (fact.kind, fact.start, fact.end) == (kind, 0, len(text))


def test_a_reminder_includes_the_empty_lines_behind_it():
    (fact,) = facts("<system-reminder>Be brief.</system-reminder>\n\nFix it.", authored=True)
    assert fact == FoundFact(FactKind.REMINDER, 0, 46, "Be brief.")


def test_a_tag_that_a_text_only_mentions_does_not_begin_a_reminder():
    text = "<system-reminder> tags hold hints.\n<system-reminder>\nBe brief.\n</system-reminder>"
    assert [fact.value for fact in facts(text)] == ["Be brief."]


@pytest.mark.parametrize("text", TYPED)
def test_text_that_a_person_types_is_not_a_fact(text):
    assert facts(text, authored=True) == ()


@pytest.mark.parametrize(
    "text", ["It is said that Today's date: 2026-11-21", "Mind Platform: linux", "Date: soon"]
)
def test_ordinary_sentences_of_a_system_text_are_not_facts(text):
    assert facts(text) == ()


def test_replies_contain_no_facts_but_tool_results_do():
    said = "<system-reminder>Be brief.</system-reminder>"
    assert module.facts_of(Text((), said, Section.REPLY)) == ()
    assert len(module.facts_of(Text((), said, Section.RESULT))) == 1


def test_texts_are_equal_if_only_their_facts_differ():
    one = Text((), PI, Section.SYSTEM)
    other = Text((), PI.replace("11-21", "11-22").replace("Write tests", "Write more tests"), Section.SYSTEM)
    assert module.only_facts_differ(one, other)
    assert not module.only_facts_differ(one, Text((), VIBE, Section.SYSTEM))
    assert not module.only_facts_differ(one, Text((), other.text, Section.REPLY))


def test_the_empty_lines_around_a_removed_fact_are_not_a_difference():
    said = Text((), "Fix it.\n\n<system-reminder>Be brief.</system-reminder>\n\nSoon.", Section.USER)
    assert module.only_facts_differ(said, Text((), "Fix it.\nSoon.", Section.USER))
    assert not module.only_facts_differ(said, Text((), "Fix it. Soon.", Section.USER))
