"""Which files are kept: new ones come, the least worth go when a tier is full, and each restore is judged."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from slotkeeper.scheduler.choice import Plan
from slotkeeper.scheduler.effects import Drop, Effect, Prove
from slotkeeper.scheduler.events import SnapshotsChanged
from slotkeeper.scheduler.idle_work import done
from slotkeeper.scheduler.retention import evict
from slotkeeper.scheduler.slot_contents import SlotContents
from slotkeeper.scheduler.snapshots import Snapshot, SnapshotId, Tier
from slotkeeper.scheduler.state import State
from slotkeeper.scheduler.steps import Load

MOST: Final = 4096  # files in one tier: the tokens of each are in memory


def kept(state: State, snapshot: Snapshot, now: float) -> list[Effect]:
    """A new file lies in the hot tier: others may have to go."""
    state.catalog.put(snapshot)
    return make_room(state, now)


def snapshots_changed(state: State, event: SnapshotsChanged) -> list[Effect]:
    """Files that were found, moved or lost. What slots hold is not saved again for that."""
    for table in state.up if event.gone else ():
        for slot in table.idle:
            contents = table.shadow.slots[slot]
            if contents and done(contents, table, state.catalog):
                table.settled[slot] = contents
    for gone in event.gone:
        state.catalog.take(gone)
    for snapshot in event.snapshots:
        state.catalog.put(snapshot)
    return make_room(state, event.at) if event.snapshots else []


def make_room(state: State, now: float) -> list[Effect]:
    """What must leave the hot tier goes to the cold one, if there is one; what must leave that is deleted."""
    orders: dict[SnapshotId, Effect] = {}  # one for each: what leaves both tiers at once is only deleted
    for tier, budget in ((Tier.HOT, state.limits.hot_bytes), (Tier.COLD, state.limits.cold_bytes)):
        for gone in _surplus(state, tier, budget, now):
            if tier is Tier.HOT and state.limits.cold_bytes:
                orders[gone] = _to_cold(state, gone)
            else:
                state.catalog.take(gone)
                orders[gone] = Drop(snapshot=gone, to_cold=False)
    return list(orders.values())


def _surplus(state: State, tier: Tier, budget: int, now: float) -> list[SnapshotId]:
    """What has no room: first files for engines that are not there, then those that are worth least."""
    catalog, gone = state.catalog, []
    over = max(catalog.size(tier) - budget, catalog.beyond(tier, MOST))
    if over <= 0 or not state.tables:
        return []
    here = {table.traits.fingerprint: table.traits for table in state.tables.values()}
    strangers = (s for s in catalog if s.tier is tier and s.fingerprint not in here)
    for snapshot in sorted(strangers, key=lambda s: s.used):
        if over > 0:
            gone.append(snapshot.id)
            over -= snapshot.size
    for fingerprint, traits in here.items():
        order = catalog.order(tier, fingerprint)
        size = sum(snapshot.size for snapshot in order)
        if over > 0 and size:
            gone += evict(order, max(0, size - over), traits=traits, live=_live(state), now=now)
            over = max(0, over - size)
    return gone


def drop(state: State, snapshot: Snapshot) -> list[Effect]:
    """It proved to be worthless."""
    state.catalog.take(snapshot.id)
    return [Drop(snapshot=snapshot.id, to_cold=False)]


def proved(state: State, plan: Plan, *, cached: int, now: float) -> list[Effect]:
    """The engine has said what the restore was worth. One that saved nothing is not offered again."""
    snapshot = next((step.snapshot for step in plan.steps if isinstance(step, Load)), None)
    if snapshot is None or plan.reuse_plan is None:
        return []
    paid = cached * 2 >= plan.reuse_plan.reuse
    if not paid:
        return [Prove(snapshot=snapshot.id, paid=False), *drop(state, snapshot)]
    if known := state.catalog.get(snapshot.id):  # its tier may have changed since it was planned
        golden = known.golden or known.shared
        state.catalog.put(replace(known, used=now, restores=known.restores + 1, golden=golden))
    return [Prove(snapshot=snapshot.id, paid=True)]


def _to_cold(state: State, gone: SnapshotId) -> Drop:
    snapshot = state.catalog.take(gone)
    if snapshot:
        state.catalog.put(replace(snapshot, tier=Tier.COLD))
    return Drop(snapshot=gone, to_cold=True)


def _live(state: State) -> list[SlotContents]:
    """What slots hold: a file beside it saves little."""
    return [contents for table in state.up for contents in table.shadow.slots if contents and contents.tokens]
