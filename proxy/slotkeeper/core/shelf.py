"""The shelf: every snapshot that may be offered, and how much of a prompt each would save.

Selection is by true prefix: a state is used where its tokens are the prompt's own, as far as the
engine can cut it, and never because positions happen to fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from slotkeeper.core.held import Held, restored, reuse
from slotkeeper.core.prefixes import PrefixOrder
from slotkeeper.core.snapshots import Snapshot, SnapshotId, Tier
from slotkeeper.core.tokens import WIDTH, Tokens
from slotkeeper.core.traits import EngineTraits

ROOT: Final = 16 * WIDTH  # bytes: snapshots whose first tokens differ are never compared further
KIN: Final = 2  # files whose checkpoints are looked at for a new one
NEVER: Final = Tokens([-1])  # a token that no model has: it makes any prompt a true extension


class Shelf:
    """Changed only when files come and go; `version` says how often."""

    def __init__(self) -> None:
        self._all: dict[SnapshotId, Snapshot] = {}
        self._by_root: dict[tuple[str, bytes], dict[SnapshotId, Snapshot]] = {}
        self._covered: dict[tuple[str, Tokens], int] = {}
        self._orders: dict[tuple[Tier, str], PrefixOrder] = {}
        self.version = 0

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

    def order(self, tier: Tier, fingerprint: str) -> PrefixOrder:
        """Those of one tier and one kind of engine, sorted by their tokens."""
        return self._orders.setdefault((tier, fingerprint), PrefixOrder())

    def fingerprints(self, tier: Tier) -> list[str]:
        """The kinds of engine for which there are files in a tier."""
        return [fingerprint for there, fingerprint in self._orders if there is tier]

    def put(self, snapshot: Snapshot) -> None:
        """Add it, or say something new of it."""
        before = self._all.get(snapshot.id)
        if before and before.tier is not snapshot.tier:
            self.order(before.tier, before.fingerprint).drop(before)
        self.order(snapshot.tier, snapshot.fingerprint).put(snapshot)
        self._all[snapshot.id] = snapshot
        self._by_root.setdefault(_root(snapshot), {})[snapshot.id] = snapshot
        self._changed()

    def take(self, snapshot: SnapshotId) -> Snapshot | None:
        """It is not to be offered any more."""
        taken = self._all.pop(snapshot, None)
        if taken:
            self.order(taken.tier, taken.fingerprint).drop(taken)
            key = _root(taken)
            del self._by_root[key][snapshot]
            if not self._by_root[key]:
                del self._by_root[key]
            self._changed()
        return taken

    def best(
        self, prompt: Tokens, traits: EngineTraits, price: Callable[[Snapshot], float]
    ) -> tuple[Snapshot, int] | None:
        """The snapshot that saves most tokens of `prompt` for its price, and how many; None if none does."""
        best, most = None, 0.0
        limit = len(prompt) - 1
        for snapshot in self._fitting(prompt, traits):
            cost = price(snapshot)
            if min(limit, len(snapshot.tokens)) - cost <= most:
                continue  # not even if all of it could be used
            saved = reuse(restored(snapshot, traits, now=0.0), prompt, traits)
            if saved - cost > most:
                best, most = (snapshot, saved), saved - cost
        return best

    def covered(self, tokens: Tokens, traits: EngineTraits) -> int:
        """How many of these tokens a snapshot would bring back to a prompt that goes on from them."""
        key = (traits.fingerprint, tokens)
        if key not in self._covered:
            further = tokens + NEVER
            self._covered[key] = max(
                (reuse(restored(s, traits, now=0.0), further, traits) for s in self._fitting(tokens, traits)),
                default=0,
            )
        return self._covered[key]

    def covers(self, held: Held, traits: EngineTraits) -> int:
        """The same for what a slot holds; of ids that we do not know nothing is covered."""
        return self.covered(held.tokens, traits) if held.tokens else 0

    def kin(self, tokens: Tokens, traits: EngineTraits) -> tuple[SnapshotId, ...]:
        """The files of the same conversation that have most in common with it, if files carry checkpoints."""
        if not traits.files_carry:
            return ()
        near = [
            (s.tokens.lcp(tokens), s.created, s.id) for s in self._fitting(tokens, traits) if s.checkpoints
        ]
        return tuple(id_ for *_, id_ in sorted(near, reverse=True)[:KIN])

    def _fitting(self, prompt: Tokens, traits: EngineTraits) -> Iterator[Snapshot]:
        if traits.snapshots and len(prompt) * WIDTH >= ROOT:
            yield from self._by_root.get((traits.fingerprint, prompt.packed[:ROOT]), {}).values()

    def _changed(self) -> None:
        self.version += 1
        self._covered.clear()


def _root(snapshot: Snapshot) -> tuple[str, bytes]:
    return snapshot.fingerprint, snapshot.tokens.packed[:ROOT]
