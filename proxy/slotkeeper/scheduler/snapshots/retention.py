"""Which snapshots are kept, and for which states a shared store is asked.

A full tier drops those that save the fewest tokens for their bytes:

1. A state saves what would have to be computed again if it alone were missing. So a state with a near
   neighbour saves little, and a duplicate saves nothing, however new they are.
2. This is weighted with the chance that prompts come for it. A prompt may diverge anywhere in a conversation
   (an edit, a step back). So every token of a path counts alike, whatever the age of the states on it; what
   counts is when the conversation as a whole was last used.
3. When states are dropped, the remaining ones serve their prompts and gain value, so losses are computed
   again.
4. The longest file of a conversation that is in a slot is dropped after all others, golden prefixes last of
   all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heapreplace
from itertools import islice
from typing import Final

from slotkeeper.scheduler.effects import Drop, Effect, Forget, Prove, Restore
from slotkeeper.scheduler.events import RoomSeen, SnapshotsChanged
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.rates import WORTH_A_FILE
from slotkeeper.scheduler.requests.pending import Plan
from slotkeeper.scheduler.slots.engine_model import (
    HALF_LIFE,
    EngineTraits,
    SlotContents,
    Snapshot,
    SnapshotId,
)
from slotkeeper.scheduler.slots.table import EngineTable
from slotkeeper.scheduler.snapshots.catalog import AnyState, Node, PrefixOrder, PrefixTree, given
from slotkeeper.scheduler.state import State
from slotkeeper.scheduler.types import RequestId, SlotId, Tier

# Chances relative to that of one step back to anywhere on a path, which is 1. They were chosen by simulation,
# with other seeds than those of benchmarks/retention.py. Halving or doubling one of the first two changes the
# figures by a twentieth; for the third it is a quarter.
NEXT_TURN: Final = 3.0  # that the conversation continues where it ended
PROVED: Final = 0.1  # that a state which was restored often is needed once more at its own end
MOVED_ON: Final = 8  # exponent: the next turn gets unlikely as a newer path shares more

BATCH: Final = 64  # of so many files or more, at least this part of all bytes is dropped at once
NEAREST: Final = 32  # neighbours of a slot's contents among which the file of its conversation is looked for
LAST_FILE: Final = 1
GOLDEN: Final = 2

Key = tuple[int, float, int, float, str]


def evict(
    snapshots: Iterable[Snapshot],
    budget_bytes: int,
    *,
    traits: EngineTraits,
    live: Collection[SlotContents] = (),
    now: float,
) -> list[SnapshotId]:
    """Return what to drop, in this order, so that the rest fits the budget.

    Of many files, some more are dropped: the value of all is computed, which takes tens of milliseconds for
    thousands. `live` is what the slots hold. A caller with many snapshots keeps them in a PrefixOrder and
    passes that.
    """
    kept = snapshots if isinstance(snapshots, PrefixOrder) else PrefixOrder(snapshots)
    sizes = [snapshot.counts for snapshot in kept]
    total = sum(sizes)
    over = total - budget_bytes
    if over <= 0:
        return []
    spare = total // BATCH if len(sizes) >= BATCH else 0
    order = kept.beside(live)
    tree = PrefixTree(order, traits)
    _demand(tree, order, now)
    cheapest = _cheapest_first(tree, order, _ranks(tree, order, traits))
    return [snapshot.id for snapshot in _enough(cheapest, over, spare)]


def _enough(cheapest: Iterable[tuple[int, Snapshot]], over: int, spare: int) -> list[Snapshot]:
    """Return the first ones of these that free `over` bytes, and `spare` bytes of those without a rank."""
    dropped: list[Snapshot] = []
    more: list[Snapshot] = []
    for rank, snapshot in cheapest:
        if over > 0:
            dropped.append(snapshot)
            over -= snapshot.counts
        elif rank or spare <= 0:
            break
        else:
            more.append(snapshot)
            spare -= snapshot.counts
    return _necessary(dropped, -over) + more


def _necessary(dropped: Sequence[Snapshot], surplus: int) -> list[Snapshot]:
    """Return them without those that fit into the surplus: the last one may have been large."""
    needed: list[Snapshot] = []
    for snapshot in reversed(dropped):
        if snapshot.counts <= surplus:
            surplus -= snapshot.counts
        else:
            needed.append(snapshot)
    return needed[::-1]


def _cheapest_first(
    tree: PrefixTree, order: PrefixOrder, ranks: dict[int, int]
) -> Iterator[tuple[int, Snapshot]]:
    """Drop the least valuable snapshot from the tree, and yield its rank and it, again and again.

    Losses only grow while states are dropped, so a key in the heap is never too high. It is enough to compute
    the top one again.
    """

    def key(index: int, snapshot: Snapshot) -> Key:
        worth = tree.loss(index) / max(1, snapshot.counts)
        return ranks.get(index, 0), worth, -snapshot.counts, _last_used(snapshot), snapshot.id

    heap = [(key(n, s), n, s) for n, s in enumerate(order.states) if isinstance(s, Snapshot)]
    heapify(heap)
    while heap:
        old_key, index, snapshot = heap[0]
        new_key = key(index, snapshot)
        if new_key > old_key:
            heapreplace(heap, (new_key, index, snapshot))
            continue
        heappop(heap)
        tree.drop(index)
        yield new_key[0], snapshot


def _last_used(state: AnyState) -> float:
    return max(state.used, state.created) if isinstance(state, Snapshot) else state.used


def _recent(used: float, now: float) -> float:
    """Return the chance that a state is needed again. The tail is long: after a day it is 1 %, not zero."""
    return HALF_LIFE / (HALF_LIFE + max(0.0, now - used))


def _demand(tree: PrefixTree, order: PrefixOrder, now: float) -> None:
    """Distribute over the tree the chances that prompts diverge there."""
    for state, end in zip(order.states, tree.ends, strict=True):
        end.newest = max(end.newest, _last_used(state))
        if isinstance(state, Snapshot):
            often = state.restores / (state.restores + 1)
            end.demand += PROVED * often * _recent(_last_used(state), now)
    for node, parent in tree.upward():
        parent.newest = max(parent.newest, node.newest)
    for leaf in dict.fromkeys(end for end in tree.ends if not end.inner):
        chance, current = _recent(leaf.newest, now), _current(leaf)
        leaf.density += chance * current / max(1, leaf.at)
        leaf.demand += NEXT_TURN * chance * current**MOVED_ON
    for node, parent in tree.upward():
        parent.density += node.density
        passing = node.density * (node.at - parent.at)
        # A prompt that diverges between two nodes is served by the upper one. On dense models it is served at
        # its own place: on average as if one half diverged at each node.
        below = passing / 2 if tree.anywhere else 0.0
        node.demand += below
        parent.demand += passing - below
    tree.settle()


def _current(leaf: Node) -> float:
    """Return the share of a path that no newer path has in common with it.

    If a newer path has most of it, the conversation continued there, and this path was abandoned.
    """
    node: Node | None = leaf
    while node is not None and node.newest <= leaf.newest:
        node = node.parent
    return 1.0 - node.at / max(1, leaf.at) if node is not None else 1.0


def _ranks(tree: PrefixTree, order: PrefixOrder, traits: EngineTraits) -> dict[int, int]:
    """Return the states that are dropped after all others, with their rank."""
    ranks: dict[int, int] = {}
    for index, state in enumerate(order.states):
        if (
            isinstance(state, SlotContents)
            and (best := _deepest_file(tree, order, index, traits)) is not None
        ):
            ranks[best] = LAST_FILE
        if isinstance(state, Snapshot) and state.golden:
            ranks[index] = GOLDEN
    return ranks


def _deepest_file(tree: PrefixTree, order: PrefixOrder, live: int, traits: EngineTraits) -> int | None:
    """Return the snapshot that saves most of a slot's contents; None if none is of its conversation."""
    best: int | None = None
    most = 0, 0.0, 0
    for index, common in islice(order.around(live), NEAREST):
        if common < most[0]:  # a file saves no more than it shares
            break
        state = order.states[index]
        if isinstance(state, Snapshot) and not state.golden:
            here = given(tree.usable[index], common, traits)
            worth = here, _last_used(state), -index
            if here * 2 > len(state.tokens) and (best is None or worth > most):
                best, most = index, worth
    return best


# -- files that come and go ------------------------------------------------------------------------------

MOST: Final = 4096  # files in one tier: the tokens of each are kept in memory


def kept(state: State, snapshot: Snapshot, now: float) -> list[Effect]:
    """Add a new file of the hot tier to the catalog, and make room for it."""
    state.catalog.put(snapshot)
    return make_room(state, now)


def snapshots_changed(state: State, event: SnapshotsChanged) -> list[Effect]:
    """Take in files that were found, moved or lost."""
    for gone in event.gone:
        state.catalog.take(gone)
    for snapshot in event.snapshots:
        state.catalog.put(snapshot)
    for snapshot_id, cold_bytes in event.counted:
        if known := state.catalog.get(snapshot_id):
            state.catalog.put(replace(known, cold_bytes=cold_bytes))
    return make_room(state, event.at) if (event.snapshots or event.counted) and not event.more else []


def room_seen(state: State, event: RoomSeen) -> list[Effect]:
    """Take in how much room the folders have: the budgets may change, and files may have to go."""
    state.rooms |= event.rooms
    state.budget_again()
    return make_room(state, event.at)


def make_room(state: State, now: float) -> list[Effect]:
    """Move surplus files from the hot tier to the cold one, if there is one, and delete other surplus.

    Nothing is deleted from a shared cold tier for lack of room: the store does that itself.
    """
    orders: dict[SnapshotId, Effect] = {}  # one for each file: one that leaves both tiers is only deleted
    for tier, budget in ((tier, state.budgets.of(tier)) for tier in Tier):
        for gone in _surplus(state, tier, budget, now):
            if tier is Tier.HOT and state.budgets.cold:
                orders[gone] = _to_cold(state, gone)
            elif tier is Tier.COLD and state.limits.shared_bytes is not None:
                state.catalog.take(gone)
                orders.setdefault(gone, Forget(snapshot=gone))
            else:
                state.catalog.take(gone)
                orders[gone] = Drop(snapshot=gone, to_cold=False)
    return list(orders.values())


def _surplus(state: State, tier: Tier, budget: int, now: float) -> list[SnapshotId]:
    """Return the files that have no room: those of absent engines first, then the least valuable ones.

    A file that is about to be restored stays, and counts again when the next file comes.
    """
    catalog, gone = state.catalog, list[SnapshotId]()
    over = max(catalog.size(tier) - budget, catalog.beyond(tier, MOST))
    if over <= 0 or not state.tables:
        return []
    tables = state.tables.values()
    here = {fingerprint: table.traits for table in tables for fingerprint in table.traits.fingerprints}
    absent = [each for each in catalog if each.tier is tier and each.fingerprint not in here]
    for snapshot in sorted(absent, key=lambda each: each.used):
        if over > 0:
            gone.append(snapshot.id)
            over -= snapshot.counts
    for fingerprint, traits in here.items():
        order = catalog.order(tier, fingerprint)
        size = sum(snapshot.counts for snapshot in order)
        if over > 0 and size:
            gone += evict(order, max(0, size - over), traits=traits, live=_live(state), now=now)
            over = max(0, over - size)
    needed = _needed(state) if gone else ()
    return [snapshot_id for snapshot_id in gone if snapshot_id not in needed]


def _needed(state: State) -> set[SnapshotId]:
    """Return the files that a begun request or idle work restores now, or after a step before."""
    preparing = (pending.preparing for pending in state.requests.values() if pending.preparing)
    left = (step for each in preparing for step in each.ahead)
    steps = (*left, *(chore.step for chore in state.chores.values()))
    return {step.snapshot.id for step in steps if isinstance(step, Restore)}


def drop(state: State, snapshot: Snapshot) -> list[Effect]:
    """Drop a snapshot that proved to be worthless."""
    state.catalog.take(snapshot.id)
    return [Drop(snapshot=snapshot.id, to_cold=False)]


def proved(state: State, plan: Plan, *, cached: int, now: float) -> list[Effect]:
    """Take in what the engine reported about a restore. A file that saved little is not offered again."""
    snapshot = next((step.snapshot for step in plan.steps if isinstance(step, Restore)), None)
    if snapshot is None or plan.reuse_plan is None:
        return []
    paid = cached * 2 >= plan.reuse_plan.reuse
    if not paid:
        return [Prove(snapshot=snapshot.id, paid=False), *drop(state, snapshot)]
    if known := state.catalog.get(snapshot.id):  # its tier may have changed since the plan was made
        golden = known.golden or known.shared
        state.catalog.put(replace(known, used=now, restores=known.restores + 1, golden=golden))
    return [Prove(snapshot=snapshot.id, paid=True)]


def _to_cold(state: State, gone: SnapshotId) -> Drop:
    if snapshot := state.catalog.get(gone):
        # In a cold folder it counts when it is there, and known how many of its bytes were there already.
        counts = snapshot.cold_bytes or 0 if state.limits.shared_bytes is None else None
        state.catalog.put(replace(snapshot, tier=Tier.COLD, cold_bytes=counts))
    return Drop(snapshot=gone, to_cold=True)


def _live(state: State) -> list[SlotContents]:
    """Return the contents of all slots. A file of the same state as a slot saves little."""
    return [contents for table in state.up for contents in table.shadow.slots if contents and contents.tokens]


# -- files of a shared store -----------------------------------------------------------------------------
# What is found there enters the catalog as `SnapshotsChanged` before placement learns the prompt's tokens.
# Then it is a snapshot of the cold tier like any other, and has its price.

LEAST_SECONDS: Final = 1.0  # for an answer: a shorter wait depends more on chance than on the store
MOST_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A state that would save more tokens of a prompt than any state here.

    `within`: seconds for which the request waits for the store's answer. That is the time that computing the
    missing tokens takes, so a search that finds nothing costs at most half of the wait.
    """

    traits: EngineTraits
    prompt: Tokens
    here: int  # tokens that a slot or file of ours covers
    within: float


def wanted_elsewhere(state: State, request: RequestId, prompt: Tokens) -> Iterator[Wanted]:
    """Yield a state for each kind of engine that can serve the request; none if it has a place.

    The text before the first image is looked for as well, because states of it are kept apart from states
    with images: other images may follow it, and other projectors may encode them.
    """
    pending = state.requests.get(request)
    if pending is None or request not in state.queue:
        return
    prompt = prompt.within(pending.arrived.space)
    text = (prompt.cut(0, chunk.start) for chunk in prompt.chunks[:1])
    for part in (prompt, *text):
        yield from _wanted(state, state.up_for(pending.arrived.model), part)


def _wanted(state: State, engines: Iterable[EngineTable], prompt: Tokens) -> Iterator[Wanted]:
    kinds: dict[str, list[EngineTable]] = {}
    for table in engines:
        if table.traits.snapshots and (fingerprint := table.traits.fingerprint_of(prompt)):
            kinds.setdefault(fingerprint, []).append(table)
    for tables in kinds.values():
        here = max(_at_hand(state, table, prompt) for table in tables)
        missing = len(prompt) - here
        if missing >= WORTH_A_FILE:
            seconds = missing / max(table.rates.prefill.mean for table in tables)
            within = min(MOST_SECONDS, max(LEAST_SECONDS, seconds))
            yield Wanted(traits=tables[0].traits, prompt=prompt, here=here, within=within)


def _at_hand(state: State, table: EngineTable, prompt: Tokens) -> int:
    slots = (table.shadow.plan_reuse(SlotId(slot), prompt).reuse for slot in range(table.traits.n_slots))
    return max(state.catalog.covered(prompt, table.traits), *slots)
