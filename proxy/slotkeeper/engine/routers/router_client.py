"""llama-server in router mode: listing, loading and unloading models (engine.md 13).

`SwapClient` does the same for llama-swap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from slotkeeper.engine.answers import EngineError, EngineGoneError
from slotkeeper.engine.client import QUICK, CallKind, CallLimits, ControlClient, Headers, is_router
from slotkeeper.engine.flags import EngineFlags, FlagError
from slotkeeper.scheduler.policies.router import ModelStatus
from slotkeeper.scheduler.types import ModelName

EVENTS: Final = CallLimits(CallKind.BRIEF, None)  # an endless stream
# Before the router answers a load, an idle victim of its choice has to end.
SWAP: Final = CallLimits(CallKind.BRIEF, 60.0)

ASKED: Final = frozenset({ModelStatus.LOADING, ModelStatus.LOADED, ModelStatus.SLEEPING})  # may be probed


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One model in a router's listing."""

    name: ModelName
    aliases: tuple[str, ...] = ()
    status: ModelStatus = ModelStatus.UNLOADED
    failed: bool = False  # its last process ended with an error
    flags: EngineFlags | None = None  # of its process; None if they cannot be read
    port: int = 0  # of its process; another port means another process


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """All models of a router. `most`: the number that may be loaded at once; 0: no limit, or not known."""

    models: tuple[ModelEntry, ...]
    most: int


class RouterClient(ControlClient):
    """A router's own routes; none of them loads or wakes a model except `load`."""

    swaps: ClassVar[bool] = False  # whether it is llama-swap, which chooses the models to unload itself
    asked: ClassVar[frozenset[ModelStatus]] = ASKED  # states in which a model may be probed
    told = False  # whether an open stream of events reports every change, so that looks between are needless
    ends = 0  # how many streams of events have ended, for example because the router has ended

    async def listing(self, *, headers: Headers | None = None) -> Listing:
        """Return the models. Raises EngineError, EngineGoneError."""
        props = await self._http.json("GET", "/props", limits=QUICK, headers=headers)
        listed = await self._http.json("GET", "/v1/models", limits=QUICK, headers=headers)
        if not isinstance(props, dict) or not is_router(props):
            raise EngineError(200, "/props: no router", foreign=True)
        entries = listed.get("data", []) if isinstance(listed, dict) else []
        models = tuple(entry_of(entry) for entry in entries if isinstance(entry, dict))
        return Listing(models=models, most=int(props.get("max_instances") or 0))

    async def load(self, model: ModelName, *, headers: Headers | None = None) -> None:
        """Ask for a load; the listing shows when it is done. Raises EngineError, EngineGoneError."""
        await self._http.json("POST", "/models/load", limits=SWAP, headers=headers, body={"model": model})

    async def unload(self, model: ModelName, *, headers: Headers | None = None) -> None:
        """Ask for an unload, which breaks off running answers. Raises like `load`."""
        await self._http.json("POST", "/models/unload", limits=SWAP, headers=headers, body={"model": model})

    async def events(self, changed: Callable[[], object], *, headers: Headers | None = None) -> None:
        """Call `changed` at each change of a model's state, until the router ends the stream.

        Raises EngineError, EngineGoneError.
        """
        async with self._http.ask("GET", "/models/sse", limits=EVENTS, headers=headers) as response:
            try:
                async for line in response.content:
                    if line.startswith(b"data:"):
                        changed()
            finally:
                self.ends += 1


def entry_of(said: Mapping[str, Any]) -> ModelEntry:
    """Parse one entry of a router's /v1/models."""
    status = said.get("status") or {}
    value = status.get("value")
    known = ModelStatus(value) if value in set(ModelStatus) else ModelStatus.UNLOADED
    try:
        flags = EngineFlags.parse([str(word) for word in status.get("args") or ()])
    except FlagError:
        flags = None
    return ModelEntry(
        name=ModelName(str(said.get("id", ""))),
        aliases=tuple(str(alias) for alias in said.get("aliases") or ()),
        status=known,
        failed=bool(status.get("failed")),
        flags=flags,
        port=flags.port if flags and known is not ModelStatus.UNLOADED else 0,
    )


async def listen(
    client: RouterClient, changed: Callable[[], object], *, rest: float, headers: Callable[[], Headers]
) -> None:
    """Call `changed` at every change, forever. If the stream ends, open it again after `rest` seconds."""
    while True:
        with suppress(EngineError, EngineGoneError):
            await client.events(changed, headers=headers())
        changed()
        await asyncio.sleep(rest)
