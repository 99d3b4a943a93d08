"""One snapshot as the store knows it."""

from __future__ import annotations

from dataclasses import dataclass

from slotkeeper.scheduler.snapshots import Snapshot, SnapshotId, Tier
from slotkeeper.scheduler.tokens import Tokens
from slotkeeper.store.index import Use
from slotkeeper.store.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """`tiers` is where its file lies: one of them, or both."""

    manifest: Manifest
    tokens: Tokens
    tiers: frozenset[Tier]
    use: Use

    @property
    def id(self) -> SnapshotId:
        return self.manifest.id

    @property
    def quickest(self) -> list[Tier]:
        """The tiers that have it, the quickest first."""
        return [tier for tier in Tier if tier in self.tiers]


def snapshot(kept: Kept, clock_offset: float) -> Snapshot:
    """For the core. `clock_offset` is what to add to the wall clock to get the core's, in seconds."""
    manifest = kept.manifest
    return Snapshot(
        id=manifest.id,
        fingerprint=manifest.fingerprint,
        tokens=kept.tokens.within(manifest.namespace),
        size=manifest.size,
        checkpoints=manifest.checkpoints,
        repaired=manifest.repaired,
        draft=manifest.draft,
        tier=kept.quickest[0],
        created=manifest.created + clock_offset,
        used=kept.use.used + clock_offset,
        restores=kept.use.restores,
        shared=manifest.golden,
        golden=manifest.golden and kept.use.restores > 0,
    )
