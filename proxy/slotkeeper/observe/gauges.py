"""Metrics that are computed at each scrape, so that they are never stale: slots, snapshots, engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from slotkeeper.observe.states import EngineSeen, EngineState
from slotkeeper.scheduler.placement import Placement
from slotkeeper.scheduler.slots.table import SlotState
from slotkeeper.scheduler.types import Tier


class SlotFigures(Collector):
    """Metrics of slots, snapshots and the queue, read from the scheduler."""

    def __init__(self, placement: Callable[[], Placement]) -> None:
        self._placement = placement

    def collect(self) -> Iterable[Metric]:
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
        budgets = GaugeMetricFamily(
            "slotkeeper_snapshot_budget_bytes",
            "Most bytes of snapshot files; absent without a limit.",
            labels=["tier"],
        )
        for tier in Tier:
            if (budget := self._placement().budgets.shown(tier)) is not None:
                budgets.add_metric([tier.value], budget)
        yield budgets
        waiting = GaugeMetricFamily("slotkeeper_queued_requests", "Requests waiting for a slot.")
        waiting.add_metric([], self._placement().queued)
        yield waiting


class EngineFigures(Collector):
    """Metrics of engines by name: one for each configured engine, and for each model that a router lists."""

    def __init__(self, engines: Callable[[], Iterable[EngineSeen]]) -> None:
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("slotkeeper_engine_up", "Whether the engine answers.", labels=["engine"])
        states = GaugeMetricFamily(
            "slotkeeper_engine_state",
            "What the engine is for requests: 1 for its state, 0 for all others.",
            labels=["engine", "state"],
        )
        losses = CounterMetricFamily(
            "slotkeeper_engine_losses",
            "Times that an engine ended, froze, fell asleep, was unloaded or became another process.",
            labels=["engine"],
        )
        for seen in self._engines():
            for state in EngineState:
                states.add_metric([seen.engine, state.value], seen.state is state)
            if seen.state is not EngineState.UNLOADED:
                up.add_metric([seen.engine], seen.answers)
            losses.add_metric([seen.engine], seen.losses)
        yield from (up, states, losses)
