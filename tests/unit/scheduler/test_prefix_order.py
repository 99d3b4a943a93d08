"""The stored order of snapshots gives the same answers as a full search."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest

from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import (
    EngineTraits,
    Memory,
    Snapshot,
    SnapshotId,
    restored,
    reuse,
)
from slotkeeper.scheduler.snapshots.catalog import NEVER, Catalog, Neighbours, PrefixOrder
from slotkeeper.scheduler.types import Tier

KINDS = {
    Memory.DENSE: EngineTraits(memory=Memory.DENSE, slot_files=True, state_version=4, fingerprint="f"),
    Memory.HYBRID: EngineTraits(
        memory=Memory.HYBRID, slot_files=True, state_version=4, files_carry=True, fingerprint="f"
    ),
}


def some_tokens(chance: random.Random) -> Tokens:
    """Draw prompts that share beginnings of 0 to 400 tokens."""
    shared = [7] * (100 * chance.randrange(5))
    return Tokens([*shared, *([chance.randrange(4)] * chance.randrange(20, 300))])


def some_snapshot(chance: random.Random, number: int) -> Snapshot:
    tokens = some_tokens(chance)
    return Snapshot(
        id=SnapshotId(f"s{number}"),
        fingerprint="f",
        tokens=tokens,
        size=chance.randrange(1, 2000),
        checkpoints=tuple(sorted(chance.sample(range(1, len(tokens)), 3))),
        tier=chance.choice(list(Tier)),
    )


def priced(rate: float, snapshot: Snapshot) -> float:
    return rate * snapshot.size


def most_saved(snapshots: list[Snapshot], prompt: Tokens, traits: EngineTraits, price: float) -> float:
    """Return the result of a search through every file."""
    values = [
        reuse(restored(s, traits, now=0.0), prompt, traits) - price * s.size
        for s in snapshots
        if s.tokens.lcp(prompt) >= 16
    ]
    return max([0.0, *values])


@pytest.mark.parametrize("memory", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_the_best_snapshot_is_the_same_as_in_a_full_search(memory, seed):
    chance, traits = random.Random(seed), KINDS[memory]
    catalog, there = Catalog(), dict[SnapshotId, Snapshot]()
    prompt = some_tokens(chance)
    for number in range(60):
        move = chance.random()
        if move < 0.5 or not there:
            new = some_snapshot(chance, number)
            catalog.put(new)
            there[new.id] = new
        elif move < 0.6:
            gone = chance.choice(list(there))
            catalog.take(gone)
            del there[gone]
        elif move < 0.7:
            known = there[chance.choice(list(there))]
            there[known.id] = replace(known, tier=chance.choice(list(Tier)))
            catalog.put(there[known.id])
        else:
            prompt = some_tokens(chance)
        for price in (0.0, 0.05, 0.3):  # several engines ask about one prompt, each with its own rates
            found = catalog.best(prompt, traits, partial(priced, price))
            value = 0.0 if found is None else found[1] - price * found[0].size
            assert value == pytest.approx(most_saved([*there.values()], prompt, traits, price))
        for tokens in (prompt, some_tokens(chance)):
            covered = most_saved([*there.values()], tokens + NEVER, traits, 0.0)
            assert catalog.covered(tokens, traits) == covered
            assert catalog.covered(tokens, traits) == covered  # now from the cache


def test_of_a_thousand_files_with_one_system_prompt_a_dense_model_is_offered_two():
    """The nearest and the smallest: no other file can be the best one, whatever the prices are."""
    system = [7] * 100
    files = [
        Snapshot(id=SnapshotId(f"s{size}"), fingerprint="f", tokens=Tokens([*system, size]), size=size)
        for size in range(1001, 2000)
    ]
    found = [*Neighbours(PrefixOrder(files), Tokens([*system, 5, 6]), dense=True)]
    assert [common for _, common in found] == [100, 100]
    assert found[-1][0].size == 1001
