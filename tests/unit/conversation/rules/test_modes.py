"""The mode of each rule for each client, and the errors for wrong settings."""

import pytest

from slotkeeper.conversation.divergence import CAUSES, OF_FACT
from slotkeeper.conversation.phrases import FactKind
from slotkeeper.conversation.rules.apply import DEFAULTS, RULES
from slotkeeper.conversation.rules.base import Choice, Mode, RuleName

QWEN = "QwenCode/0.24.4 (linux; x64)"


def modes(*texts: str, client: str = QWEN):
    return Choice.of(texts, DEFAULTS).for_client(client)


def test_every_rule_name_has_one_rule_with_a_description():
    assert sorted(rule.name for rule in RULES) == sorted(RuleName)
    assert all(rule.about.endswith(".") and rule.safe.endswith(".") for rule in RULES)


def test_every_rule_undoes_a_cause_and_every_fact_has_one():
    assert {seen.rule for seen in CAUSES.values()} >= set(RuleName), "give the rule a Cause: CAUSES"
    assert set(OF_FACT) == set(FactKind), "give the kind of fact its Cause: OF_FACT"


def test_rules_that_move_text_only_observe_by_default():
    moving = {"date", "clock", "cwd", "git_status", "environment", "memory_file", "countdown", "reminders"}
    observing = {name.value for name, mode in DEFAULTS.items() if mode is Mode.OBSERVE}
    assert observing == moving | {"reasoning", "pruned_results", "refreshed_context", "side_question"}
    assert Mode.OFF not in DEFAULTS.values()


def test_without_a_setting_each_rule_has_its_default_mode():
    assert modes() == DEFAULTS


def test_all_rules_can_be_set_at_once_and_the_last_matching_setting_counts():
    chosen = modes("all=off", "date=fix", "date=observe@curl*")
    assert chosen[RuleName.DATE] is Mode.FIX
    assert {mode for name, mode in chosen.items() if name is not RuleName.DATE} == {Mode.OFF}


@pytest.mark.parametrize(
    ("pattern", "fits"), [("qwen*", True), ("*QWEN*", True), ("opencode*", False), ("*", True), ("", True)]
)
def test_a_client_pattern_ignores_case(pattern, fits):
    assert (modes(f"git_status=fix@{pattern}")[RuleName.GIT_STATUS] is Mode.FIX) is fits


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("date", "NAME=MODE"),
        ("date=maybe", "off, observe, fix"),
        ("dates=fix", "there is no rule 'dates'"),
        ("", "NAME=MODE"),
    ],
)
def test_a_wrong_rule_setting_is_refused_with_advice(text, message):
    with pytest.raises(ValueError, match=message):
        modes(text)
