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
from slotkeeper.scheduler.costs import Limits
from slotkeeper.scheduler.effects import Drop, Forget
from slotkeeper.scheduler.elsewhere import LEAST_SECONDS, MOST_SECONDS, Wanted
from slotkeeper.scheduler.events import Loading
from slotkeeper.scheduler.retention import MOST
from slotkeeper.scheduler.slot_contents import Tier
from slotkeeper.scheduler.types import EngineId, Reason, RequestId, Tokens

A, B = (Tokens(range(n, n + 5000)) for n in (10_000, 20_000))
MORE = Tokens(range(100))
SHARED = Limits(hot_bytes=10**12, cold_bytes=10**15, shared_bytes=10**12)


def shared(limits: Limits = SHARED, **more: Any) -> Play:
    return Play(**{"limits": limits, **NEW_FILES, **more})


def wanted(play: Play, request: str, prompt: Tokens) -> list[Wanted]:
    return list(play.placement.wanted_elsewhere(RequestId(request), prompt))


def test_a_prompt_that_is_in_no_slot_and_no_file_is_looked_for():
    play = shared()
    play << arrives("r1")
    (one,) = wanted(play, "r1", A)
    assert (one.traits.fingerprint, one.prompt, one.here) == ("f", A, 0)
    assert one.within == pytest.approx(MOST_SECONDS), "computing would take five seconds"
    assert wanted(play, "r1", A.cut(0, 300))[0].within == LEAST_SECONDS


def test_a_state_is_looked_for_in_the_namespace_of_its_request():
    play = shared()
    assert one_turn(play, "r1", A, slot=0)
    play << arrives("r2", namespace="mine")
    (one,) = wanted(play, "r2", A + MORE)
    assert (one.prompt.space, one.here) == ("mine", 0)


def test_of_a_prompt_with_images_the_text_before_them_is_looked_for_too():
    """Other images may follow the same text; the states of that text have a fingerprint of their own."""
    play = shared(projector="p")
    play << arrives("r1")
    prompt = A + Tokens.image(b"a" * 32, 300) + B
    whole, text = wanted(play, "r1", prompt)
    assert (whole.prompt, whole.traits.fingerprint_of(whole.prompt)) == (prompt, "f-p")
    assert (text.prompt, text.traits.fingerprint_of(text.prompt)) == (A, "f")
    assert play << snapshots_changed(snapshot("s1", A))
    assert [one.here for one in wanted(play, "r1", prompt)] == [len(A)]


def test_engines_with_different_projectors_are_different_kinds_for_images_only():
    play = shared(engines=2, projector="p")
    other = play.placement.tables[EngineId("e1")]
    other.shadow.traits = replace(other.traits, projector="q")
    play << arrives("r1")
    found = wanted(play, "r1", A + Tokens.image(b"a" * 32, 300) + B)
    assert [one.traits.fingerprint_of(one.prompt) for one in found] == ["f-p", "f-q", "f"]


def test_a_request_that_lacks_few_tokens_is_not_looked_for_elsewhere():
    play = shared()
    assert one_turn(play, "r1", A, slot=0)
    play << arrives("r2")
    assert wanted(play, "r2", A + MORE) == []
    assert wanted(play, "r2", A + B)[0].here == 5000
    assert play << snapshots_changed(snapshot("s1", B))
    assert wanted(play, "r2", B + MORE) == []


def test_a_request_that_has_its_place_is_not_looked_for():
    play = shared()
    assert play << arrives("r1") << knows("r1", A) >> goes("r1")
    assert wanted(play, "r1", A) == []
    assert wanted(play, "nobody", A) == []


def test_what_is_found_is_restored_in_the_time_that_computing_would_take():
    play = shared()
    play << arrives("r1") << snapshots_changed(snapshot("s1", A, tier=Tier.COLD, size=10**7))
    assert play << knows("r1", A + MORE) >> restores(0, "s1", within=5.0)
    assert play << restored(brought=2.0) >> goes("r1", slot=0, reason=Reason.SNAPSHOT)


def test_what_came_too_late_is_computed_and_its_price_is_known():
    play = shared()
    before = play.table.rates.restore_price(10**7, cold=True)
    play << arrives("r1") << snapshots_changed(snapshot("s1", A, tier=Tier.COLD, size=10**7))
    assert play << knows("r1", A + MORE) >> restores(0, "s1")
    assert play << restored(Loading.UNFIT, brought=5.0) >> goes("r1", slot=0, reason=Reason.COLD)
    for _ in range(3):
        play.table.rates.brought(10**7, 5.0)
    assert play.table.rates.restore_price(10**7, cold=True) > len(A) > before


def test_for_want_of_room_files_leave_the_slot_folder_and_nothing_leaves_the_store():
    play = shared(Limits(hot_bytes=1000, cold_bytes=10**15, shared_bytes=500))
    play << snapshots_changed(snapshot("s1", A, size=900), snapshot("s2", B, size=900))
    (gone,) = play.effects
    assert isinstance(gone, Drop)
    assert gone.to_cold
    tiers = {each.tier for each in play.placement.catalog}
    assert tiers == {Tier.HOT, Tier.COLD}


def test_remembered_snapshots_of_a_shared_store_are_bounded():
    play = shared()
    many = [snapshot(f"s{n}", Tokens(range(n, n + 20)), tier=Tier.COLD, size=1) for n in range(MOST + 5)]
    play << snapshots_changed(*many)
    assert len(play.placement.catalog) == MOST
    forgotten = [effect.snapshot for effect in play.effects if isinstance(effect, Forget)]
    assert len(forgotten) == len(play.effects) == 5
    assert forgotten[0] not in play.placement.catalog
