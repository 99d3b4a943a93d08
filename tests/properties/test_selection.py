"""Properties of every choice among random slots and files, compared with all alternatives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from slotkeeper.scheduler.candidates import cheapest
from slotkeeper.scheduler.effects import Restore
from slotkeeper.scheduler.prices import Want, loss, price_of, restore_price
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.requests.pending import Plan
from slotkeeper.scheduler.slots.engine_model import (
    Checkpoint,
    EngineTraits,
    Memory,
    SlotContents,
    Snapshot,
    SnapshotId,
    restored,
    reuse,
)
from slotkeeper.scheduler.slots.shadow import EngineShadow, Source
from slotkeeper.scheduler.slots.table import EngineTable
from slotkeeper.scheduler.snapshots.catalog import Catalog
from slotkeeper.scheduler.types import EngineId, Tier

SETTINGS = settings(max_examples=300)
NOW = 5000.0
PIECE = 40  # tokens: conversations part only between pieces, and two in a row are what a file must share
MEMORIES = (Memory.DENSE, Memory.HYBRID, Memory.RECURRENT, Memory.SWA)


@dataclass
class World:
    """One engine, its slots, the files in the catalog, and a prompt."""

    table: EngineTable
    snapshots: list[Snapshot]
    prompt: Tokens

    def catalog(self, snapshots: list[Snapshot] | None = None) -> Catalog:
        catalog = Catalog()
        for snapshot in self.snapshots if snapshots is None else snapshots:
            catalog.put(snapshot)
        return catalog

    def plan(self, catalog: Catalog | None = None) -> Plan:
        files = self.catalog() if catalog is None else catalog
        plan = cheapest([self.table], self.prompt, pinnable=True, now=NOW, catalog=files)
        assert plan is not None
        return plan


def talk(path: list[int]) -> Tokens:
    """A node of the tree of all conversations: the same first choices, the same first tokens."""
    ids = [(n + 1) * 10_000 + choice * 1000 + i for n, choice in enumerate(path) for i in range(PIECE)]
    return Tokens(ids)


PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=6)


@st.composite
def cuts(draw, length):
    """Where checkpoints are: at the seams of pieces, a few tokens before, in no order."""
    places = [at - back for at in range(PIECE, length + 1, PIECE) for back in (0, 4)]
    return tuple(draw(st.lists(st.sampled_from(places), max_size=4, unique=True)))


@st.composite
def worlds(draw):
    version = draw(st.sampled_from([2, 4]))
    traits = EngineTraits(
        n_slots=draw(st.integers(1, 3)),
        memory=draw(st.sampled_from(MEMORIES)),
        n_swa=16,
        ram_cache=draw(st.booleans()),
        slot_files=True,
        fingerprint="f",
        state_version=version,
        files_carry=version == 4,
    )
    table = EngineTable(EngineId("e0"), EngineShadow(traits))
    for slot in range(traits.n_slots):
        if draw(st.booleans()):
            tokens = talk(draw(PATHS)).cut(0, draw(st.integers(20, 240)))
            places = draw(cuts(max(PIECE, len(tokens))))
            contents = SlotContents(
                tokens=tokens,
                checkpoints=tuple(Checkpoint(at, 1) for at in places if at <= len(tokens)),
                turns=draw(st.integers(0, 5)),
                used=NOW - draw(st.integers(0, 3000)),
                opaque=draw(st.sampled_from([0, 0, 7])),
            )
            table.shadow.slots[slot] = contents
    snapshots = []
    for n, path in enumerate(draw(st.lists(PATHS, max_size=6))):
        tokens = talk(path)
        snapshots.append(
            Snapshot(
                id=SnapshotId(f"s{n}"),
                fingerprint=draw(st.sampled_from(["f", "f", "f", "of another engine"])),
                tokens=tokens,
                size=len(tokens) * draw(st.sampled_from([10_000, 65_536, 400_000])),
                checkpoints=draw(cuts(len(tokens))) if version == 4 else (),
                repaired=draw(st.booleans()),
                tier=draw(st.sampled_from(list(Tier))),
            )
        )
    prompt = talk(draw(PATHS)) + Tokens(range(draw(st.integers(1, 30))))
    return World(table, snapshots, prompt)


def file_of(plan: Plan) -> Snapshot | None:
    return next((step.snapshot for step in plan.steps if isinstance(step, Restore)), None)


def gives(world: World, snapshot: Snapshot) -> int:
    if snapshot.fingerprint != world.table.traits.fingerprint:
        return 0
    return reuse(restored(snapshot, world.table.traits, now=0.0), world.prompt, world.table.traits)


@SETTINGS
@given(worlds())
def test_no_file_is_restored_if_a_fully_reusable_free_slot_gives_as_many_tokens(world):
    """A restore that saves no tokens costs time, and another slot its state."""
    snapshot = file_of(world.plan())
    for contents in world.table.shadow.slots if snapshot else ():
        if contents and not contents.opaque and contents.tokens.lcp(world.prompt) == contents.total:
            assert reuse(contents, world.prompt, world.table.traits) < gives(world, snapshot)


@SETTINGS
@given(worlds())
def test_no_cheaper_slot_or_file_is_overlooked(world):
    """All slots and all files, one by one: none is better than what was chosen."""
    catalog, table = world.catalog(), world.table
    want = Want(world.prompt, (), NOW, catalog)
    price = world.plan(catalog).price
    for slot in table.idle:
        as_it_is = table.shadow.plan_reuse(slot, world.prompt)
        assert price <= price_of(table, as_it_is, want) + 1e-6
        for snapshot in world.snapshots:
            if saved := gives(world, snapshot):
                reuse_plan = replace(as_it_is, reuse=saved, source=Source.SNAPSHOT, parked=False)
                copies = table.rates.copy_price(table.shadow.copied_bytes(reuse_plan, table.idle))
                computed = len(world.prompt) - saved + copies
                at_most = computed + restore_price(table, snapshot) + loss(table, reuse_plan, want)
                # If the engine would load from its RAM cache, it does not use a restored file.
                after = table.shadow.plan_reuse_restored(slot, world.prompt, snapshot)
                assert price <= at_most + 1e-6 or after.reuse != saved


@SETTINGS
@given(worlds())
def test_a_file_is_restored_only_if_it_fits_the_engine_and_the_prompt_can_use_it(world):
    plan = world.plan()
    if snapshot := file_of(plan):
        assert snapshot.fingerprint == world.table.traits.fingerprint
        assert 0 < gives(world, snapshot) == plan.reuse_plan.reuse
        assert plan.reuse_plan.reuse <= snapshot.tokens.lcp(world.prompt)


@SETTINGS
@given(worlds(), st.integers(0, 2**32))
def test_the_order_of_the_files_does_not_change_the_choice(world, seed):
    mixed = [*world.snapshots, *world.snapshots[:2]]  # some are reported twice
    Random(seed).shuffle(mixed)
    one, other = world.plan(), world.plan(world.catalog(mixed))
    assert (one.price, one.slot, one.reason, file_of(one)) == (
        other.price,
        other.slot,
        other.reason,
        file_of(other),
    )


@SETTINGS
@given(worlds(), st.data())
def test_removed_files_do_not_change_the_choice(world, data):
    gone = data.draw(st.sets(st.sampled_from(world.snapshots)) if world.snapshots else st.just(set()))
    catalog = world.catalog()
    for snapshot in gone:
        assert catalog.take(snapshot.id) == snapshot
    left = [snapshot for snapshot in world.snapshots if snapshot not in gone]
    assert world.plan(catalog) == world.plan(world.catalog(left))
    assert sorted(snapshot.id for snapshot in catalog) == sorted(snapshot.id for snapshot in left)


@SETTINGS
@given(worlds(), st.integers(1, 10**6))
def test_of_two_files_of_one_state_the_larger_is_never_chosen(world, more):
    larger = [replace(s, id=SnapshotId(f"0{s.id}"), size=s.size + more) for s in world.snapshots]
    snapshot = file_of(world.plan(world.catalog([*larger, *world.snapshots])))
    assert snapshot is None or snapshot in world.snapshots


@SETTINGS
@given(worlds())
def test_the_catalogs_coverage_equals_the_best_reuse_of_any_file(world):
    further, traits = world.prompt + Tokens([-1]), world.table.traits
    states = [restored(s, traits, now=0.0) for s in world.snapshots if s.fingerprint == traits.fingerprint]
    best = max((reuse(state, further, traits) for state in states), default=0)
    catalog = world.catalog()
    assert catalog.covered(world.prompt, traits) == best == catalog.covered(world.prompt, traits)
