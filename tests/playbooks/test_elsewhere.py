"""A shared cold tier: what the scheduler looks for in it, what it does with a result, and what that costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from playbooks.playbook import (
    NEW_FILES,
    Play,
    arrives,
    goes,
    knows,
    one_turn,
    restored,
    restores,
    snapshot,
    snapshots_changed,
)
from slotkeeper.scheduler.effects import Drop, Forget
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.snapshots.budgets import Limits
from slotkeeper.scheduler.snapshots.retention import BATCH, LEAST_SECONDS, MOST, MOST_SECONDS, Wanted
from slotkeeper.scheduler.types import EngineId, Loading, Reason, RequestId, Tier

A, B = (Tokens(range(n, n + 5000)) for n in (10_000, 20_000))
MORE = Tokens(range(100))
SHARED = Limits(hot_bytes=10**12, cold_bytes=10**15, shared_bytes=10**12)


def shared(limits: Limits = SHARED, **more: Any) -> Play:
    return Play(**{"limits": limits, **NEW_FILES, **more})


def lookups(play: Play, request: str, prompt: Tokens) -> list[Wanted]:
    return list(play.placement.wanted_elsewhere(RequestId(request), prompt))


def test_a_prompt_that_no_slot_and_no_file_holds_is_looked_up_in_the_shared_store():
    play = shared()
    play << arrives("r1")
    (one,) = lookups(play, "r1", A)
    assert (one.traits.fingerprint, one.prompt, one.here) == ("f", A, 0)
    assert one.within == pytest.approx(MOST_SECONDS), "computing would take five seconds"
    assert lookups(play, "r1", A.cut(0, 300))[0].within == LEAST_SECONDS


def test_the_lookup_uses_the_namespace_of_its_request():
    play = shared()
    assert one_turn(play, "r1", A, slot=0)
    play << arrives("r2", namespace="mine")
    (one,) = lookups(play, "r2", A + MORE)
    assert (one.prompt.space, one.here) == ("mine", 0)


def test_the_text_before_the_first_image_is_looked_up_too():
    """Other images may follow the same text; the states of that text have a fingerprint of their own."""
    play = shared(projector="p")
    play << arrives("r1")
    prompt = A + Tokens.image(b"a" * 32, 300) + B
    whole, text = lookups(play, "r1", prompt)
    assert (whole.prompt, whole.traits.fingerprint_of(whole.prompt)) == (prompt, "f-p")
    assert (text.prompt, text.traits.fingerprint_of(text.prompt)) == (A, "f")
    assert play << snapshots_changed(snapshot("s1", A))
    assert [one.here for one in lookups(play, "r1", prompt)] == [len(A)]


def test_engines_with_different_projectors_are_different_kinds_for_images_only():
    play = shared(engines=2, projector="p")
    other = play.placement.tables[EngineId("e1")]
    other.shadow.traits = replace(other.traits, projector="q")
    play << arrives("r1")
    found = lookups(play, "r1", A + Tokens.image(b"a" * 32, 300) + B)
    assert [one.traits.fingerprint_of(one.prompt) for one in found] == ["f-p", "f-q", "f"]


def test_a_request_that_lacks_few_tokens_is_not_looked_up():
    play = shared()
    assert one_turn(play, "r1", A, slot=0)
    play << arrives("r2")
    assert lookups(play, "r2", A + MORE) == []
    assert lookups(play, "r2", A + B)[0].here == 5000
    assert play << snapshots_changed(snapshot("s1", B))
    assert lookups(play, "r2", B + MORE) == []


def test_a_request_that_was_sent_is_not_looked_up():
    play = shared()
    assert play << arrives("r1") << knows("r1", A) >> goes("r1")
    assert lookups(play, "r1", A) == []
    assert lookups(play, "unknown", A) == []


def test_a_found_state_is_restored_within_the_time_that_computing_would_take():
    play = shared()
    play << arrives("r1") << snapshots_changed(snapshot("s1", A, tier=Tier.COLD, size=10**7))
    assert play << knows("r1", A + MORE) >> restores(0, "s1", within=5.0)
    assert play << restored(brought=2.0) >> goes("r1", slot=0, reason=Reason.SNAPSHOT)


def test_a_restore_that_was_too_slow_falls_back_to_computing_and_raises_the_restore_price():
    play = shared()
    before = play.table.rates.restore_price(10**7, cold=True)
    play << arrives("r1") << snapshots_changed(snapshot("s1", A, tier=Tier.COLD, size=10**7))
    assert play << knows("r1", A + MORE) >> restores(0, "s1")
    assert play << restored(Loading.UNFIT, brought=5.0) >> goes("r1", slot=0, reason=Reason.COLD)
    for _ in range(3):
        play.table.rates.brought(10**7, 5.0)
    assert play.table.rates.restore_price(10**7, cold=True) > len(A) > before


def test_files_move_from_a_full_slot_folder_to_the_store_and_none_is_removed_from_the_store():
    play = shared(Limits(hot_bytes=1000, cold_bytes=10**15, shared_bytes=500))
    play << snapshots_changed(snapshot("s1", A, size=900), snapshot("s2", B, size=900))
    (gone,) = play.effects
    assert isinstance(gone, Drop)
    assert gone.to_cold
    sizes = {each.tier: each.counts for each in play.placement.catalog}
    assert sizes == {Tier.HOT: 900, Tier.COLD: 900}


def test_remembered_snapshots_of_a_shared_store_are_bounded():
    play = shared()
    many = [snapshot(f"s{n}", Tokens(range(n, n + 20)), tier=Tier.COLD, size=1) for n in range(MOST + 5)]
    play << snapshots_changed(*many)
    assert len(play.placement.catalog) == MOST - MOST // BATCH
    forgotten = [effect.snapshot for effect in play.effects if isinstance(effect, Forget)]
    assert len(forgotten) == len(play.effects) == 5 + MOST // BATCH
    assert forgotten[0] not in play.placement.catalog
