"""Slots of an engine that has just started are warmed in idle time, if a restore is not enough.

Older builds keep no draft state in files: a restored slot continues at once, but its drafts are bad until
some thousand tokens were computed there (engine.md 2.6). So the latest conversations are restored from
an earlier file, and the tail is computed before any request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from slotkeeper.scheduler.catalog import Catalog
from slotkeeper.scheduler.effects import Purpose
from slotkeeper.scheduler.snapshots import Snapshot
from slotkeeper.scheduler.steps import Load, Prefill, Step
from slotkeeper.scheduler.table import EngineTable

# Tokens. So many bring two thirds of the lost drafts back, the rest costs the whole prompt (engine.md 2.6).
TAIL: Final = 2000
RECENT: Final = 3600.0  # seconds: who was away for longer will hardly come back just now


def needs_warming(table: EngineTable) -> bool:
    return table.traits.speculative and table.traits.files_carry is False


def coldest(table: EngineTable, catalog: Catalog, now: float) -> Snapshot | None:
    """The end of the latest conversation that no slot holds; of those that one holds none is asked again."""
    fresh = [
        s
        for s in catalog
        if s.fingerprint == table.traits.fingerprint and now - s.used < RECENT and s.id not in table.warmed
    ]
    contents = [h.tokens for h in table.shadow.slots if h]
    if len(table.warmed) > len(catalog):  # files that are gone
        table.warmed.intersection_update([s.id for s in catalog])
    for snapshot in sorted(fresh, key=lambda s: (s.used, len(s.tokens)), reverse=True):
        if not any(tokens.lcp(snapshot.tokens) * 2 > len(snapshot.tokens) for tokens in contents):
            return _whole(snapshot, fresh)
        table.warmed.add(snapshot.id)
    return None


def _whole(latest: Snapshot, fresh: Sequence[Snapshot]) -> Snapshot:
    """The end of its conversation: cuts are saved a moment after that, and are prefixes of it."""
    same = (s for s in fresh if s.tokens.lcp(latest.tokens) == len(latest.tokens))
    return max(same, key=lambda s: len(s.tokens))


def first_step(end: Snapshot, catalog: Catalog, table: EngineTable) -> Step | None:
    """From the longest file that leaves a tail; a short conversation is computed whole. None: too long."""
    for tail in (TAIL, TAIL // 2):
        early = end.tokens.cut(0, max(0, len(end.tokens) - tail + 1))
        found = catalog.best(early, table.traits, lambda _: 0.0)
        if found and len(found[0].tokens) == found[1]:
            return Load(found[0])
        if len(end.tokens) <= 2 * tail:
            return Prefill(end.tokens, Purpose.DRAFT)
    return None
