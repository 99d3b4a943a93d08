"""The benchmark behind docs/when-you-need-it.md: its clients are as described."""

from __future__ import annotations

from itertools import pairwise

from benchmarks.when_needed import CLIENTS, TURNS, turns_about


def test_two_clients_alternate_and_only_append():
    script, turns = turns_about(), []
    turn = next(script)
    try:
        while True:
            turns.append(turn)
            turn = script.send({"role": "assistant", "content": f"answer {len(turns)}"})
    except StopIteration:
        pass
    assert [turn.session for turn in turns] == ["A", "B"] * TURNS
    for one in (turns[::2], turns[1::2]):
        for before, after in pairwise(one):
            assert after.messages[: len(before.messages)] == before.messages
    assert turns[0].messages[0] != turns[1].messages[0], "they share nothing"


def test_all_engine_configurations_have_one_slot():
    assert all(flags[:2] == ("-np", "1") for _, flags in CLIENTS.values())
