"""Excerpts of changes."""

from slotkeeper.conversation.layout import Edit
from slotkeeper.conversation.rules.apply import LONGEST, shown
from slotkeeper.conversation.rules.base import Mode, RuleName


def test_an_excerpt_shows_only_the_change_and_a_few_words_around_it():
    text = "x" * 5000 + "It is Saturday now." + "y" * 5000
    edit = Edit(("messages", 0, "content"), text, text.replace("Saturday", "Sunday"))
    change = shown(edit, RuleName.DATE, Mode.FIX)
    assert change.path == "messages[0].content"
    assert "Saturday" in change.before
    assert "Sunday" in change.after
    assert len(change.before) < 120


def test_other_values_are_shown_as_json_and_absent_values_as_empty():
    change = shown(Edit(("tools",), None, [{"name": "ls"}]), RuleName.TOOL_ORDER, Mode.OBSERVE)
    assert (change.before, change.after) == ("", '[{"name":"ls"}]')


def test_a_long_value_is_shortened():
    change = shown(Edit(("a",), "", "z" * 9999), None, Mode.FIX)
    assert len(change.after) == LONGEST + 1
