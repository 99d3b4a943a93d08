"""Who asks, and what it cost: sums for each client, for a bounded number of them.

A client is a program with a key: its name, and the beginning of a digest of the key (of the address, where
none is sent). The key itself is nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from slotkeeper.observe.why.record import Record
from slotkeeper.scheduler.figures import Sums, of_request

MOST: Final = 20  # clients with sums of their own; all that come later are one
OTHER: Final = "other"
DIGEST: Final = 8  # characters of it that are shown
LABELS: Final = ("agent", "key")


@dataclass(slots=True)
class Client:
    agent: str
    key: str
    seen: float  # on the driver's clock, when its last counted request came
    sums: Sums = field(default_factory=Sums)

    def shown(self, now: float) -> dict[str, Any]:
        """For JSON. Other work of the engine is not included."""
        sums = self.sums.shown()
        figures = ("requests", "prompt_tokens", "reused", "prepared", "computed", "saved_seconds", "hit_rate")
        idle = round(max(0.0, now - self.seen), 1)
        return {"agent": self.agent, "key": self.key, "idle_seconds": idle} | {
            name: sums[name] for name in figures
        }


class Clients:
    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._clients: dict[tuple[str, str], Client] = {}

    def __iter__(self) -> Iterator[Client]:
        """Those that computed most in front, and the others together at the end."""
        order = sorted(self._clients.values(), key=lambda client: -client.sums.computed)
        return iter(sorted(order, key=lambda client: client.agent == client.key == OTHER))

    def add(self, record: Record) -> None:
        """A request that was answered, where the engine gave figures for it."""
        if record.usage is None:
            return
        name = (record.name.agent, record.client[:DIGEST])
        if name not in self._clients and len(self._clients) >= self._most:
            name = (OTHER, OTHER)
        client = self._clients.setdefault(name, Client(*name, seen=record.at))
        client.seen = max(client.seen, record.at)
        client.sums.add(**of_request(record.usage, record.oracle, record.reused_seconds, record.step_seconds))


class ClientFigures(Collector):
    """The same for a scraper. Read at each scrape."""

    def __init__(self, clients: Iterable[Client]) -> None:
        self._clients = clients

    def collect(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "slotkeeper_client_requests",
            f"Requests by client, for the first {MOST} of them.",
            labels=LABELS,
        )
        tokens = CounterMetricFamily(
            "slotkeeper_client_prompt_tokens",
            "Their prompt tokens: what earlier work had left, and what they waited for.",
            labels=(*LABELS, "source"),
        )
        saved = GaugeMetricFamily(
            "slotkeeper_client_saved_seconds",
            "Prefill time that they were spared, less what the steps before their requests took.",
            labels=LABELS,
        )
        for client in self._clients:
            labels = (client.agent, client.key)
            requests.add_metric(labels, client.sums.requests)
            tokens.add_metric((*labels, "cached"), client.sums.reused)
            tokens.add_metric((*labels, "computed"), client.sums.computed)
            saved.add_metric(labels, client.sums.saved_seconds)
        yield from (requests, tokens, saved)
