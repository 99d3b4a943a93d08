"""Gauges that are read from the scheduler at each scrape, so they are never stale."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from slotkeeper.scheduler.placement import Placement
from slotkeeper.scheduler.slot_contents import Tier
from slotkeeper.scheduler.table import SlotState


class SlotGauges(Collector):
    """Reads the scheduler at each scrape, so that its metrics are never stale."""

    def __init__(self, placement: Callable[[], Placement]) -> None:
        self._placement = placement

    def collect(self) -> Iterable[GaugeMetricFamily]:
        slots = GaugeMetricFamily("slotkeeper_slots", "Slots of all engines, by state.", labels=["state"])
        tables = self._placement().tables.values()
        for state in SlotState:
            slots.add_metric([state.value], sum(len(table.in_state(state)) for table in tables if table.up))
        yield slots
        catalog = self._placement().catalog
        yield GaugeMetricFamily("slotkeeper_snapshots", "Snapshots that may be offered.", value=len(catalog))
        sizes = GaugeMetricFamily("slotkeeper_snapshot_bytes", "Bytes of snapshot files.", labels=["tier"])
        for tier in Tier:
            sizes.add_metric([tier.value], catalog.size(tier))
        yield sizes
        waiting = GaugeMetricFamily("slotkeeper_queued_requests", "Requests waiting for a slot.")
        waiting.add_metric([], self._placement().queued)
        yield waiting
