"""The benchmark behind docs/when-you-need-it.md: its clients are as described."""

from __future__ import annotations

from itertools import pairwise

from benchmarks.when_needed import CLIENTS, TURNS, turns_about

from unit.bench.test_sessions import extends, played


def test_two_clients_alternate_and_only_append():
    turns = played(turns_about())
    assert [turn.session for turn in turns] == ["A", "B"] * TURNS
    for one in (turns[::2], turns[1::2]):
        assert all(extends(after, before) for before, after in pairwise(one))
    assert turns[0].messages[0] != turns[1].messages[0], "they share nothing"


def test_all_engine_configurations_have_one_slot():
    assert all(flags[:2] == ("-np", "1") for _, flags in CLIENTS.values())
