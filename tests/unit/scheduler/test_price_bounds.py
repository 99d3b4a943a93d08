"""Among many slots only a few are priced. That no decision changes is a property: see `tests/properties`."""

from random import Random
from typing import Any

import pytest

from slotkeeper.scheduler.candidates import NEAR, Held, LiveStates, PriceBounds, cheapest
from slotkeeper.scheduler.catalog import Catalog
from slotkeeper.scheduler.engine_model import EngineTraits, Memory
from slotkeeper.scheduler.shadow import EngineShadow
from slotkeeper.scheduler.slot_contents import SlotContents, Snapshot, SnapshotId
from slotkeeper.scheduler.table import EngineTable
from slotkeeper.scheduler.tokens import Tokens
from slotkeeper.scheduler.types import EngineId, SlotId

NOW = 1000.0
SYSTEM = Tokens(range(500))
FILES: Any = {"slot_files": True, "fingerprint": "f", "state_version": 4, "files_carry": True}
TRAITS = EngineTraits(n_slots=8, memory=Memory.DENSE, ram_cache=False, **FILES)


def conversation(number: int, length: int = 700) -> Tokens:
    return SYSTEM + Tokens(range(number * 10_000, number * 10_000 + length))


@pytest.fixture
def fleet():
    """32 engines with 256 conversations behind one system prompt; every second one is in a file, too."""
    chance, tables, catalog = Random(3), [], Catalog()
    for number in range(32):
        table = EngineTable(EngineId(f"e{number}"), EngineShadow(TRAITS))
        for slot in range(8):
            tokens = conversation(1 + number * 8 + slot, chance.randint(300, 3000))
            used = NOW - chance.uniform(1, 600)
            table.shadow.slots[slot] = SlotContents(tokens=tokens, turns=chance.randint(1, 5), used=used)
            if slot % 2:
                name, size = SnapshotId(f"s{number}-{slot}"), len(tokens) * 65_536
                catalog.put(Snapshot(id=name, fingerprint="f", tokens=tokens, size=size))
        tables.append(table)
    return tables, catalog


@pytest.mark.parametrize(
    "prompt",
    [conversation(77, 3200), conversation(900), Tokens(range(5000, 6000))],
    ids=["next turn", "new conversation", "nothing in common"],
)
def test_few_of_many_slots_are_priced(fleet, prompt, monkeypatch):
    tables, catalog = fleet
    bounds, asked = PriceBounds(), []
    plan_reuse = EngineShadow.plan_reuse

    def counted(shadow, slot, *args, **more):
        asked.append((shadow, slot))
        return plan_reuse(shadow, slot, *args, **more)

    monkeypatch.setattr(EngineShadow, "plan_reuse", counted)
    found = cheapest(tables, prompt, pinnable=True, now=NOW, catalog=catalog, bounds=bounds)
    few = len(asked)
    assert found == cheapest(tables, prompt, pinnable=True, now=NOW, catalog=catalog)
    assert few <= 24
    assert len(asked) - few >= 256


def test_states_near_a_prompt_are_those_that_share_most_with_it():
    """Compared with a search among all; states that come and go included."""
    chance, states = Random(5), LiveStates()
    held: dict[Held, SlotContents | None] = {}

    def drawn() -> Tokens:
        cuts = [chance.choice([0, 1, 2]) * 1000 for _ in range(4)]
        ids = [(n + 1) * 10_000 + cut + i for n, cut in enumerate(cuts) for i in range(50)]
        return Tokens(ids).within(chance.choice(["", "", "ns"])).cut(0, chance.randint(1, 200))

    for _ in range(400):
        place = Held(EngineId(f"e{chance.randrange(3)}"), SlotId(chance.randrange(8)))
        come = SlotContents(tokens=drawn()) if chance.random() < 0.8 else None
        states.replace(place, held.get(place), come)
        held[place] = come
        prompt = drawn()
        shared = {place: c.tokens.lcp(prompt) for place, c in held.items() if c}
        near = states.near(prompt)
        found = {Held(e, slot): common for e, slots in near.slots.items() for slot, common in slots.items()}
        assert found == {place: common for place, common in shared.items() if common >= NEAR}
        assert near.others == max((common for common in shared.values() if common < NEAR), default=0)
    assert len(states) == sum(contents is not None for contents in held.values())


def test_what_engines_hold_is_forgotten_with_them(fleet):
    tables, catalog = fleet
    bounds = PriceBounds()
    for there in (tables, tables[:2], tables):
        cheapest(there, SYSTEM, pinnable=True, now=NOW, catalog=catalog, bounds=bounds)
        assert len(bounds) == 8 * len(there)
