"""What engines have computed, by their own counter: what no answer and no sidecar can make prettier."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AsyncExitStack
from typing import Final, Self

from prometheus_client.parser import text_string_to_metric_families

from slotkeeper.engine.client import EngineClient, EngineError, EngineGoneError

EVALUATED: Final = "llamacpp:prompt_tokens_total"  # without what was cached; what was broken off counts too


class Counter:
    """Prompt tokens evaluated by all engines at some URLs. Use as an async context manager.

    A sidecar's data port passes the question on to the engine behind it.
    """

    def __init__(self, urls: Iterable[str]) -> None:
        self._clients = [EngineClient(url) for url in urls]
        self._last: dict[str, int] = {}
        self._exits = AsyncExitStack()
        self.total: int | None = 0  # since it was read first; None: not all of them tell

    def __repr__(self) -> str:
        return f"<Counter of {len(self._clients)} engines: {self.total}>"

    async def __aenter__(self) -> Self:
        for client in self._clients:
            await self._exits.enter_async_context(client)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()

    async def read(self) -> int | None:
        """An engine that counts less than before was restarted: all that it counts is new."""
        for client in self._clients:
            try:
                now = counted(await client.metrics())
            except (EngineError, EngineGoneError, ValueError):  # such as 501 without --metrics
                self.total = None
                break
            before = self._last.get(client.base, now)
            self._last[client.base] = now
            if self.total is not None:
                self.total += now - before if now >= before else now
        return self.total


def counted(metrics: str) -> int:
    """Of an engine's /metrics. Raises ValueError where it is not there."""
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == EVALUATED:
                return int(sample.value)
    raise ValueError(f"no {EVALUATED}")
