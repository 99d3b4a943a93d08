"""A new scheduler after a bug in the one before: it is told of the engines, the drains and the snapshots.

If every answer of GET /slots met the bug, renewals at once would meet it a thousand times a second. And if an
event that tells the new scheduler met it, they would never end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from math import inf
from typing import Final

from slotkeeper.observe.log import get_logger
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime.engines import Engines
from slotkeeper.runtime.link import EngineLink
from slotkeeper.runtime.membership import Membership
from slotkeeper.scheduler.budgets import FolderRoom
from slotkeeper.scheduler.costs import Limits
from slotkeeper.scheduler.effects import Effect
from slotkeeper.scheduler.engine_model import EngineTraits
from slotkeeper.scheduler.events import Closing, EngineUp, Event, RoomSeen, SnapshotsChanged
from slotkeeper.scheduler.placement import Placement
from slotkeeper.scheduler.slot_contents import Snapshot, SnapshotId, Tier
from slotkeeper.scheduler.types import RequestId, id_of

LEAST_APART: Final = 1.0  # seconds between two renewals

log = get_logger(__name__)

Told = tuple[Placement, list[tuple[Event, list[Effect]]]]


class Renewal:
    """Knows what a new scheduler must be told, and when."""

    def __init__(self, engines: Engines, membership: Membership, metrics: Metrics, limits: Limits) -> None:
        self._engines = engines
        self._membership = membership
        self._metrics = metrics
        self._limits = limits
        self._snapshots: dict[SnapshotId, Snapshot] = {}  # those that no scheduler has been told of yet
        self._rooms: Mapping[Tier, FolderRoom] = {}
        self._at = -inf  # when the latest renewal was due
        self._pending = False

    def new_placement(self) -> Placement:
        return Placement(*(link.engine for link in self._engines.upstreams), limits=self._limits)

    def failed(self, event: Event, error: Exception) -> None:
        """Record that a decision failed."""
        log.error("placement_failed", request_id=asker(event), cause=type(event).__name__, exc_info=error)
        self._metrics.fallback("placement")

    @property
    def pending(self) -> bool:
        """Whether the present scheduler is not told of the engines yet."""
        return self._pending

    def keep(self, placement: Placement) -> None:
        """Keep what a scheduler that is replaced knows of snapshots and their folders."""
        self._snapshots |= {snapshot.id: snapshot for snapshot in placement.catalog}
        self._rooms = placement.rooms or self._rooms

    def due_in(self) -> float | None:
        """Return after how many seconds to call `told`; None if that was returned already."""
        if self._pending:
            return None
        now = time.monotonic()
        self._pending, self._at = True, max(now, self._at + LEAST_APART)
        return self._at - now

    def told(self, *, closing: bool) -> Told:
        """Return a new scheduler that knows everything, and the effects of each event that told it.

        If one of these events fails, another new scheduler is told of the rest.
        """
        events, self._pending = list(self._events(closing=closing)), False
        self._snapshots.clear()
        while True:
            placement, effects = self.new_placement(), []
            for event in events:
                try:
                    effects.append((event, placement.on(event)))
                except Exception as error:  # noqa: BLE001 - of whatever kind the bug is
                    self.failed(event, error)
                    events.remove(event)
                    break
            else:
                return placement, effects

    def _events(self, *, closing: bool) -> Iterator[Event]:
        now = time.monotonic()
        yield from self._membership.asked()
        yield RoomSeen(at=now, rooms=self._rooms)
        yield SnapshotsChanged(at=now, snapshots=tuple(self._snapshots.values()))
        for router in self._engines.routers.values():
            yield router.listed()
        for link in self._engines.links.values():
            if link.traits and link.up:
                yield up(link, link.traits, fresh=False)
        if closing:
            yield Closing(at=now)


def up(link: EngineLink, traits: EngineTraits, *, fresh: bool) -> EngineUp:
    """Return the event that an engine is up. `fresh`: nothing has run there yet."""
    at, model = time.monotonic(), link.address.model
    return EngineUp(at=at, engine=link.engine, traits=traits, fresh=fresh, model=model)


def asker(of: Event | Effect) -> str:
    """Return the id of the request of an event or effect, for the log."""
    return id_of(getattr(of, "request", RequestId("")))
