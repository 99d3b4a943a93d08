"""The figures of a request: what it waited for, what it reused, and what was prepared for it."""

from __future__ import annotations

import pytest

from playbooks.playbook import (
    NEW_FILES,
    Play,
    arrives,
    ends,
    filled,
    fills,
    follows,
    goes,
    knows,
    leaves,
    one_turn,
    planted,
    plants,
    proves,
    reports,
    restored,
    restores,
    snapshot,
    snapshots_changed,
    starts,
)
from slotkeeper.scheduler.effects import Purpose
from slotkeeper.scheduler.prompts.tokens import Tokens

A = Tokens(range(10_000, 12_000))
MORE = Tokens(range(20_000, 20_100))  # the reply as the client sends it back, not computed yet
NEXT = A + MORE
ASKED = Tokens(range(30_000, 30_050))
PREPARED = {"usage__reused": len(NEXT), "usage__prepared": len(MORE), "oracle": len(MORE) + len(ASKED)}


def dense(**more) -> Play:
    return Play(memory="dense", n_slots=1, **more)


def test_prefetched_tokens_count_as_reused_and_prepared_and_stay_in_the_oracle():
    play = dense()
    assert one_turn(play, "r1", A, slot=0)
    assert (play << follows("r1", NEXT)).wakes() >> fills(0, Purpose.NEXT, tokens=NEXT)
    assert play << filled(len(MORE))
    assert play << arrives("r2") << knows("r2", NEXT + ASKED) >> goes("r2", slot=0)
    assert play << ends("r2", len(NEXT) + 50, len(NEXT)) >> reports("r2", **PREPARED)


def test_prepared_tokens_in_a_restored_file_count_as_prepared():
    play = dense(**NEW_FILES)
    play.placement._state.ahead.computed(NEXT, len(A))
    play.placement.tree().add(A, 0.0)
    assert play << snapshots_changed(snapshot("s1", NEXT))
    assert play << arrives("r2") << knows("r2", NEXT + ASKED) >> restores(0, "s1") << restored() >> goes("r2")
    told = reports("r2", **PREPARED)
    assert play << ends("r2", len(NEXT) + 50, len(NEXT)) >> proves("s1", paid=True) >> told


def test_a_cancelled_request_counts_the_tokens_that_the_engine_reached():
    play = dense()
    assert one_turn(play, "r1", A, slot=0)
    assert play << arrives("r2") << knows("r2", NEXT) >> goes("r2", slot=0) << starts("r2")
    reached = len(A) + 30
    told = reports("r2", usage__prompt=reached, usage__computed=30, usage__reused=len(A), oracle=30)
    assert play << leaves("r2", reached=reached, cached=len(A)) >> told
    assert play.placement.tree().longest(NEXT) == reached  # computed so far


def test_a_prefetched_prompt_that_is_cancelled_at_once_has_an_oracle_of_0():
    play = dense()
    assert one_turn(play, "r1", A, slot=0)
    assert play << arrives("r2") << knows("r2", NEXT) >> goes("r2", slot=0) << starts("r2")
    told = reports("r2", usage__prompt=len(A), usage__computed=0, usage__reused=len(A), oracle=0)
    assert play << leaves("r2", reached=len(A), cached=len(A)) >> told


def test_a_plant_that_is_cancelled_with_its_request_counts_as_computed_for_it():
    play = Play(memory="hybrid", n_slots=1, eager_thinning=False)
    assert one_turn(play, "r1", A, slot=0)
    other = A.cut(0, 1000) + Tokens(range(40_000, 41_000))
    play << arrives("r2") << knows("r2", other) >> plants("r2", 0, Purpose.PLANT)
    told = reports("r2", usage__prompt=512, usage__computed=512, usage__planted=512, oracle=1)
    assert play << leaves("r2", reached=512, cached=512, planted=512) >> told


def test_a_failed_plant_counts_as_computed_for_its_request():
    play = Play(memory="hybrid", n_slots=1, eager_thinning=False)
    assert one_turn(play, "r1", A, slot=0)
    other = A.cut(0, 1000) + Tokens(range(40_000, 41_000))
    play << arrives("r2") << knows("r2", other) >> plants("r2", 0, Purpose.PLANT)
    play << planted("r2", None, wasted=300)
    assert play.pending("r2").planted == 300


# -- time ----------------------------------------------------------------------------------------------


def test_reused_seconds_are_reused_tokens_at_the_learned_prefill_rate():
    play = dense()
    assert play << arrives("r1") << knows("r1", A) >> goes("r1", slot=0)
    assert play << ends("r1", 2000, 0, prefill_seconds=4.0) >> reports("r1", reused_seconds=0.0)
    assert play << arrives("r2") << knows("r2", NEXT) >> goes("r2", slot=0)
    assert play << ends("r2", 2100, 2000, prefill_seconds=0.2) >> reports("r2", reused_seconds=4.0)


def test_reused_seconds_are_unknown_until_a_prefill_rate_is_learned():
    play = dense()
    assert play << arrives("r1") << knows("r1", A) >> goes("r1", slot=0)
    assert play << ends("r1", 2000, 10) >> reports("r1", reused_seconds=None)


def test_a_restore_counts_as_step_seconds_and_a_plant_does_not():
    play = dense(**NEW_FILES)
    assert play << snapshots_changed(snapshot("s1", NEXT))
    assert play << arrives("r1") << knows("r1", NEXT + ASKED) >> restores(0, "s1")
    play.later(2.0) << restored() >> goes("r1")
    assert play.pending("r1").step_seconds == pytest.approx(2.0, abs=0.1)

    play = Play(memory="hybrid", n_slots=1, eager_thinning=False)
    assert one_turn(play, "r1", A, slot=0)
    play << arrives("r2") << knows("r2", A.cut(0, 1000) + MORE + A)
    play >> plants("r2", 0, Purpose.PLANT)
    play.later(2.0) << planted("r2", 1004) >> goes("r2")
    assert play.pending("r2").step_seconds == 0.0
