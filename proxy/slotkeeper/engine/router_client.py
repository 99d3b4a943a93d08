"""llama-server in router mode: which models it has, and having it load and unload them (engine.md 13)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Self

from slotkeeper.engine.answers import EngineError, EngineGoneError
from slotkeeper.engine.client import QUICK, is_router
from slotkeeper.engine.flags import EngineFlags, FlagError
from slotkeeper.engine.http import CallKind, CallLimits, EngineHttp, Headers
from slotkeeper.scheduler.events import ModelStatus
from slotkeeper.scheduler.types import ModelName

EVENTS: Final = CallLimits(CallKind.BRIEF, None)  # a stream without an end
# What a load needs before it is answered: an idle victim of the router's own choice has to end.
SWAP: Final = CallLimits(CallKind.BRIEF, 60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One model in a router's listing."""

    name: ModelName
    aliases: tuple[str, ...] = ()
    status: ModelStatus = ModelStatus.UNLOADED
    failed: bool = False  # its last process ended with an error
    flags: EngineFlags | None = None  # of its process, None where they cannot be read
    port: int = 0  # of its process; another one is another process


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """All models of a router. `most`: so many may be loaded at once; 0: all of them."""

    models: tuple[ModelEntry, ...]
    most: int


class RouterClient:
    """A router's own routes; none of them loads or wakes a model unasked.

    Use as an async context manager, or `close` it.
    """

    def __init__(self, base: str, *, api_key: str | None = None) -> None:
        self._http = EngineHttp(base, api_key=api_key)
        self.base = self._http.base

    def __repr__(self) -> str:
        return f"<RouterClient {self._http!r}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.close()

    async def listing(self, *, headers: Headers | None = None) -> Listing:
        """Raises EngineError, EngineGoneError."""
        props = await self._http.json("GET", "/props", limits=QUICK, headers=headers)
        listed = await self._http.json("GET", "/v1/models", limits=QUICK, headers=headers)
        if not isinstance(props, dict) or not is_router(props):
            raise EngineError(200, "/props: no router", foreign=True)
        entries = listed.get("data", []) if isinstance(listed, dict) else []
        models = tuple(entry_of(entry) for entry in entries if isinstance(entry, dict))
        return Listing(models=models, most=int(props.get("max_instances") or 0))

    async def load(self, model: ModelName, *, headers: Headers | None = None) -> None:
        """Ask for it; that it is loaded the listing will say. Raises EngineError, EngineGoneError."""
        await self._http.json("POST", "/models/load", limits=SWAP, headers=headers, body={"model": model})

    async def unload(self, model: ModelName, *, headers: Headers | None = None) -> None:
        """The same. What runs there is broken off."""
        await self._http.json("POST", "/models/unload", limits=SWAP, headers=headers, body={"model": model})

    async def events(self, heard: Callable[[], object], *, headers: Headers | None = None) -> None:
        """Call `heard` at each change of a model's state, until the router ends the stream.

        Raises EngineError, EngineGoneError.
        """
        async with self._http.ask("GET", "/models/sse", limits=EVENTS, headers=headers) as response:
            async for line in response.content:
                if line.startswith(b"data:"):
                    heard()


def entry_of(said: Mapping[str, Any]) -> ModelEntry:
    """One entry of /v1/models as a router writes it."""
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


async def listen(client: RouterClient, heard: Callable[[], object], *, rest: float) -> None:
    """Call `heard` at every change, for ever; a stream that ends is opened again after `rest` seconds."""
    while True:
        with suppress(EngineError, EngineGoneError):
            await client.events(heard)
        heard()
        await asyncio.sleep(rest)
