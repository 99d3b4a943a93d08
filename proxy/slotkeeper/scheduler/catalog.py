"""The catalog: every snapshot that may be offered, and how much of a prompt each would save.

Selection is by true prefix: a state is used where its tokens are the prompt's own, as far as the
engine can cut it, and never because positions happen to fit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final

from slotkeeper.scheduler.prefixes import PrefixOrder
from slotkeeper.scheduler.slot_contents import SlotContents, restored, reuse
from slotkeeper.scheduler.snapshots import Snapshot, SnapshotId, Tier
from slotkeeper.scheduler.tokens import Tokens
from slotkeeper.scheduler.traits import EngineTraits

ROOT: Final = 16  # tokens: with less in common a snapshot is of no use
KIN: Final = 2  # files whose checkpoints are looked at for a new one
NEIGHBOURS: Final = 16  # among which they are sought
REMEMBERED: Final = 64  # answers that hold until a file comes or goes; each keeps its tokens alive
NEVER: Final = Tokens([-1])  # a token that no model has: it makes any prompt a true extension


class Catalog:
    """Files stand sorted by their tokens, so that a prompt is compared with its neighbours, not with all."""

    def __init__(self) -> None:
        self._all: dict[SnapshotId, Snapshot] = {}
        self._orders: dict[tuple[Tier, str], PrefixOrder] = {}
        self._covered: dict[tuple[str, Tokens], int] = {}
        self.apart = False  # whether there ever was one of a namespace

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self._all.values())

    def __contains__(self, snapshot: SnapshotId) -> bool:
        return snapshot in self._all

    def get(self, snapshot: SnapshotId) -> Snapshot | None:
        return self._all.get(snapshot)

    def size(self, tier: Tier) -> int:
        """Bytes of all files in one tier."""
        return sum(snapshot.size for snapshot in self._all.values() if snapshot.tier is tier)

    def beyond(self, tier: Tier, most: int) -> int:
        """Bytes of as many average files as there are more than `most` in a tier."""
        count = sum(1 for snapshot in self._all.values() if snapshot.tier is tier)
        return self.size(tier) * max(0, count - most) // max(1, count)

    def order(self, tier: Tier, fingerprint: str) -> PrefixOrder:
        """Those of one tier and one kind of engine, sorted by their tokens."""
        return self._orders.get((tier, fingerprint)) or PrefixOrder()

    def put(self, snapshot: Snapshot) -> None:
        """Add it, or say something new of it."""
        before = self._all.get(snapshot.id)
        if before and before.tier is not snapshot.tier:
            self._leaves_order(before)
        self._orders.setdefault((snapshot.tier, snapshot.fingerprint), PrefixOrder()).put(snapshot)
        self._all[snapshot.id] = snapshot
        self.apart = self.apart or bool(snapshot.tokens.space)
        if before is None or before.checkpoints != snapshot.checkpoints:
            self._covered.clear()

    def take(self, snapshot: SnapshotId) -> Snapshot | None:
        """It is not to be offered any more."""
        taken = self._all.pop(snapshot, None)
        if taken:
            self._leaves_order(taken)
            self._covered.clear()
        return taken

    def _leaves_order(self, snapshot: Snapshot) -> None:
        """With the last one the order goes, too: engines come with new fingerprints for ever."""
        order = self._orders[snapshot.tier, snapshot.fingerprint]
        order.drop(snapshot)
        if not order.states:
            del self._orders[snapshot.tier, snapshot.fingerprint]

    def best(
        self, prompt: Tokens, traits: EngineTraits, price: Callable[[Snapshot], float]
    ) -> tuple[Snapshot, int] | None:
        """The snapshot that saves most tokens of `prompt` for its price, and how many; None if none does."""
        best, most = None, 0.0
        for order in self._fitting(traits):
            for snapshot, common in _nearest(order, prompt):
                if common <= most:
                    break
                bound = _at_most(snapshot, common, traits)
                if bound <= most or bound - (cost := price(snapshot)) <= most:
                    continue
                saved = reuse(restored(snapshot, traits, now=0.0), prompt, traits)
                if saved - cost > most:
                    best, most = (snapshot, saved), saved - cost
        return best

    def covered(self, tokens: Tokens, traits: EngineTraits) -> int:
        """How many of these tokens a snapshot would bring back to a prompt that goes on from them."""
        if not self._all:
            return 0
        key = (traits.fingerprint, tokens)
        if key not in self._covered:
            if len(self._covered) == REMEMBERED:
                self._covered.clear()
            found = self.best(tokens + NEVER, traits, lambda _: 0.0)
            self._covered[key] = found[1] if found else 0
        return self._covered[key]

    def covers(self, contents: SlotContents, traits: EngineTraits) -> int:
        """The same for what a slot holds; of ids that we do not know nothing is covered."""
        return self.covered(contents.tokens, traits) if contents.tokens else 0

    def kin(self, tokens: Tokens, traits: EngineTraits) -> tuple[SnapshotId, ...]:
        """The files of the same conversation that have most in common with it, if files carry checkpoints."""
        if not traits.files_carry:
            return ()
        near = [
            (common, s.created, s.id)
            for order in self._fitting(traits)
            for s, common in islice(_nearest(order, tokens), NEIGHBOURS)
            if s.checkpoints
        ]
        return tuple(id_ for *_, id_ in sorted(near, reverse=True)[:KIN])

    def _fitting(self, traits: EngineTraits) -> Iterator[PrefixOrder]:
        """Those that this engine can load, tier by tier."""
        for tier in Tier:
            order = self._orders.get((tier, traits.fingerprint))
            if order and traits.snapshots:
                yield order


def _nearest(order: PrefixOrder, prompt: Tokens) -> Iterator[tuple[Snapshot, int]]:
    """Snapshots and what each has in common with `prompt`, the most first: they stand around its place."""
    states, common = order.states, order.common
    place = (prompt.space, prompt.packed)
    behind = bisect_left(states, place, key=lambda state: (state.tokens.space, state.tokens.packed))
    before = behind - 1
    left = states[before].tokens.lcp(prompt) if before >= 0 else 0
    right = states[behind].tokens.lcp(prompt) if behind < len(states) else 0
    while max(left, right) >= ROOT:
        if left >= right:
            state, shared = states[before], left
            left = min(left, common[before])  # the first one has nothing in common with one before it
            before -= 1
        else:
            state, shared = states[behind], right
            behind += 1
            right = min(right, common[behind]) if behind < len(states) else 0
        if isinstance(state, Snapshot):
            yield state, shared


def _at_most(snapshot: Snapshot, common: int, traits: EngineTraits) -> int:
    """A bound of `reuse`, for a thousandth of its cost: all in common, or its newest checkpoint there."""
    if traits.cuttable or len(snapshot.tokens) <= common:
        return common
    # One more than in common will do for a window, whose last token does not count.
    return min(common, max((at for at in snapshot.checkpoints if at <= common + 1), default=0))
