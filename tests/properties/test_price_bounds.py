"""Leaving out slots by lower bounds changes no decision: it is the same as after pricing every slot."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slotkeeper.scheduler import candidates
from slotkeeper.scheduler.candidates import Overwrites, PriceBounds
from slotkeeper.scheduler.catalog import Catalog
from slotkeeper.scheduler.engine_model import Checkpoint, EngineTraits, Known, Memory
from slotkeeper.scheduler.pending import Plan
from slotkeeper.scheduler.shadow import EngineShadow
from slotkeeper.scheduler.slot_contents import SlotContents, Snapshot, SnapshotId, Tier
from slotkeeper.scheduler.table import EngineTable, Maintenance, SlotState
from slotkeeper.scheduler.tokens import Chunk, Tokens
from slotkeeper.scheduler.types import EngineId, RequestId, SlotId

PIECE = 150  # tokens: conversations part only between pieces
MEMORIES = (Memory.DENSE, Memory.DENSE, Memory.HYBRID, Memory.RECURRENT, Memory.SWA)
STATES = (SlotState.IDLE, SlotState.IDLE, *SlotState)


class Fleet:
    """Engines, their slots and files, and random changes of all of them."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = Random(seed)
        self.now, self.catalog, self.bounds = 5000.0, Catalog(), PriceBounds()
        files, version = chance.random() < 0.8, chance.choice([2, 4])
        self.same = EngineTraits(
            n_slots=chance.randint(1, 5),
            memory=chance.choice(MEMORIES),
            n_swa=16,
            n_ubatch=32,
            ram_cache=chance.random() < 0.4,
            similarity=chance.choice([0.0, 0.1, 0.5]),
            slot_files=files,
            fingerprint="f" if files else "",
            state_version=version if files else 0,
            files_carry=version == 4 if files else None,
            speculative=chance.random() < 0.2,
        )
        self.spaces = chance.choice([("",), ("",), ("", "ns1")])
        self.tables = [self.engine(number) for number in range(chance.randint(1, 5))]
        self.asked = self.tokens()
        for table in self.tables:
            for slot in table.idle:
                self.fill(table, slot)
        for _ in range(chance.randint(0, 8)):
            self.file()

    def engine(self, number: int) -> EngineTable:
        traits = self.same if self.chance.random() < 0.8 else replace(self.same, checkpoint_cap=2, n_slots=3)
        return EngineTable(EngineId(f"e{number}"), EngineShadow(replace(traits)))

    def tokens(self) -> Tokens:
        path = [self.chance.choice([0, 0, 1, 2]) for _ in range(self.chance.randint(1, 5))]
        ids = [(n + 1) * 10_000 + one * 1000 + i for n, one in enumerate(path) for i in range(PIECE)]
        tokens = Tokens(ids).within(self.chance.choice(self.spaces))
        if self.chance.random() < 0.1:
            tokens = Tokens.of(tokens.packed, tokens.space, (Chunk(20, 60, b"image"),))
        return tokens.cut(0, self.chance.randint(1, len(tokens)))

    def chain(self) -> tuple[bytes, ...]:
        return tuple(b"%d" % self.chance.choice([0, n, n]) for n in range(self.chance.randint(0, 4)))

    def contents(self) -> SlotContents:
        chance, tokens = self.chance, self.tokens()
        places = sorted(chance.randint(1, len(tokens)) for _ in range(chance.randint(0, 3)))
        return SlotContents(
            tokens=tokens,
            checkpoints=tuple(Checkpoint(at, 1) for at in places),
            opaque=chance.choice([0, 0, 7, 400]),
            floor=chance.choice([0, 0, 0, 30]),
            turns=chance.randint(0, 4),
            used=self.now - chance.choice([-5, 0, 10, 10, 900, 3000]),
            hash_chain=self.chain(),
            following=self.tokens() if chance.random() < 0.1 else None,
        )

    def fill(self, table: EngineTable, slot: int) -> None:
        found = self.chance.random()
        others = [held for other in self.tables_so_far() for held in other.shadow.slots if held]
        if found < 0.15:
            table.shadow.slots[slot] = None
        elif found < 0.3 and others:  # equal slots, so that prices are equal
            table.shadow.slots[slot] = self.chance.choice(others)
        else:
            table.shadow.slots[slot] = self.contents()

    def tables_so_far(self) -> list[EngineTable]:
        return getattr(self, "tables", [])

    def file(self) -> None:
        chance, tokens = self.chance, self.tokens()
        held = [h.tokens for table in self.tables for h in table.shadow.slots if h]
        if held and chance.random() < 0.6:
            tokens = chance.choice(held)
        self.catalog.put(
            Snapshot(
                id=SnapshotId(f"s{chance.randint(0, 9)}"),  # one that is known may come with other tokens
                fingerprint=chance.choice(["f", "f", "other"]),
                tokens=tokens,
                size=len(tokens) * chance.choice([1000, 65_536, 400_000]),
                checkpoints=tuple(sorted(chance.sample(range(1, 700), 2))),
                tier=chance.choice(list(Tier)),
            )
        )

    def move(self, table: EngineTable, slot: SlotId) -> None:
        state = self.chance.choice(STATES)
        request = RequestId(f"r{self.chance.random()}")
        table.move(slot, state, request, self.now)
        if state is SlotState.MAINTENANCE:
            becomes = self.asked if self.chance.random() < 0.3 else None
            stalls = self.chance.random() < 0.5
            table.maintenance[slot] = Maintenance(self.now - 0.1, 0.3, becomes, stalls=stalls)
        if state in (SlotState.LAUNCHED, SlotState.RUNNING):
            prefill = self.chance.choice([0.0, 0.2, 3.0])
            table.work.begins(request, self.now, prefill=prefill, reply=self.chance.choice([0.5, 4.0]))

    def files_take(self, table: EngineTable, _: SlotId) -> None:
        table.rates.saved(self.chance.randint(10**5, 10**7), self.chance.choice([0.001, 0.2]))
        table.rates.restored(self.chance.randint(10**5, 10**7), self.chance.choice([0.001, 0.2]))

    def prompts_take(self, table: EngineTable, _: SlotId) -> None:
        for __ in range(3):
            table.rates.prefilled(1000, self.chance.choice([0.3, 1.0, 1.1, 5.0]))

    def copies(self, table: EngineTable, _: SlotId) -> None:
        if table.traits.ram_cache:
            table.shadow.ram[:] = [*table.shadow.ram, self.contents()][-3:]

    def learns(self, table: EngineTable, _: SlotId) -> None:
        table.shadow.learn(table.traits.corrected(Known.UNFOUND, ram_cache=self.chance.random() < 0.3))
        table.no_save_until = self.now + self.chance.choice([-1, 100])

    def finds_files(self, table: EngineTable, _: SlotId) -> None:
        if table.traits.snapshots:
            fingerprint, carry = self.chance.choice(["f", "other"]), self.chance.choice([True, False])
            table.shadow.traits = replace(table.traits, fingerprint=fingerprint, files_carry=carry)

    def passes(self, *_: object) -> None:
        self.now += self.chance.choice([0.01, 5.0, 900.0])

    def comes(self, *_: object) -> None:
        self.file()

    def goes(self, *_: object) -> None:
        if len(self.catalog):
            self.catalog.take(self.chance.choice([*self.catalog]).id)

    def change(self) -> None:
        """Change one thing on which a price may depend."""
        table = self.chance.choice(self.tables)
        usual = (self.fill, self.move, self.comes, self.goes, self.passes)
        others = (self.files_take, self.prompts_take, self.copies, self.learns, self.finds_files)
        change = self.chance.choice((*usual, *usual, *others))
        change(table, SlotId(self.chance.randrange(len(table.states))))

    def compared(self) -> None:
        prompt = self.asked = self.tokens() + Tokens(range(self.chance.randint(2, 90)))
        chain, chance = self.chain(), self.chance
        own = [held for table in self.tables for held in table.shadow.slots if held and held.hash_chain]
        if own and chance.random() < 0.4:
            chain = (*chance.choice(own).hash_chain, b"more")
        pinnable, plain = chance.random() < 0.7, chance.random() < 0.1

        def asks(bounds: PriceBounds | None) -> Plan | None:
            return candidates.cheapest(
                self.tables, prompt, hash_chain=chain, pinnable=pinnable, plain=plain, now=self.now,
                catalog=self.catalog, bounds=bounds,
            )  # fmt: skip

        full, found = asks(None), asks(self.bounds)
        assert found == full
        assert (found.beaten if found else ()) == (full.beaten if full else ())


@pytest.fixture(autouse=True)
def _bounds_at_once(monkeypatch):
    monkeypatch.setattr(candidates, "ALL_PRICED_SLOTS", 0)


@settings(max_examples=300)
@given(st.integers(0, 2**32))
def test_decisions_by_bounds_are_those_of_pricing_every_slot(seed):
    """Ties and the next best plans included; after changes of everything that a bound depends on."""
    fleet = Fleet(seed)
    for _ in range(6):
        fleet.compared()
        for _ in range(fleet.chance.randint(0, 4)):
            fleet.change()


@settings(max_examples=100)
@given(st.integers(0, 2**32))
def test_costs_that_were_kept_are_those_computed_afresh(seed):
    """What overwriting a slot costs is kept for slots that did not change; all else is computed again."""
    fleet = Fleet(seed)
    kept: dict[EngineId, Overwrites] = {}
    for _ in range(20):
        for table in fleet.tables:
            fresh = Overwrites.of(table, fleet.catalog, fleet.now, 0, None)
            found = Overwrites.of(table, fleet.catalog, fleet.now, 0, kept.get(table.engine))
            assert (found.worths, found.least) == (fresh.worths, fresh.least)
            assert [one.tokens for one in found.covered] == [one.tokens for one in fresh.covered]
            kept[table.engine] = found
        fleet.change()
