"""llama-swap (github.com/mostlygeek/llama-swap): listing and loading its models.

By its source, from the versions with `/running` to the newest one of 2026. What differs between them:

* `/running` lists models that are ready; newer versions also those that start or stop.
* `/v1/models` lists other things as models: aliases, models of peers, selectors, profiles. `/api/events`
  reports aliases, all models, and every change of a state at once. Older versions have no such route.
  Its stream ends when llama-swap ends or reads its configuration again.
* A request for a model makes llama-swap unload others first, as its groups or its matrix say; the rest stay.
  It waits until their running answers have ended. No route shows which models a load would unload.
* Every request to /upstream/MODEL/ loads that model, and restarts its `ttl`. Nothing prevents that.

A model is never unloaded by us: the load of another one does that, and only if it must.
"""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import orjson

from slotkeeper.engine.answers import EngineError
from slotkeeper.engine.client import (
    QUICK,
    READY,
    RUNNING,
    CallKind,
    CallLimits,
    EngineAddress,
    Headers,
    running_in,
)
from slotkeeper.engine.flags import EngineFlags, FlagError, starts
from slotkeeper.engine.routers.router_client import EVENTS, Listing, ModelEntry, RouterClient
from slotkeeper.scheduler.policies.router import ModelStatus
from slotkeeper.scheduler.types import ModelName

LOAD: Final = CallLimits(CallKind.TASK, None)  # answered when the model is loaded: minutes for a large one
FAILED: Final = frozenset({500, 502, 503})  # its answers if a model could not be loaded
# In its words for a load that was ended from outside: another client unloaded the model, or llama-swap ends.
ENDED: Final = ("model unloaded", "aborted", "shutdown", "shutting down", "context canceled")
LONGEST: Final = 1 << 20  # bytes of one event that is read; longer ones are log texts
CONTAINERS: Final = frozenset({"docker", "podman"})  # their own flags would be read
# /running leaves stopped models out. A model that stops must end before it can be loaded again.
STATES: Final = {READY: ModelStatus.LOADED, "starting": ModelStatus.LOADING, "stopping": ModelStatus.LOADING}
NOT_MODELS: Final = frozenset({"alias", "peer", "profile", "selector"})  # by the newest versions


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """One model in an event of llama-swap."""

    state: str
    aliases: tuple[str, ...]


def _named(listed: Any) -> dict[str, Mapping[str, Any]]:
    """Return the entries of /v1/models by their names."""
    entries = listed.get("data", []) if isinstance(listed, dict) else []
    return {str(entry.get("id", "")): entry for entry in entries if isinstance(entry, dict)}


class SwapClient(RouterClient):
    """llama-swap's own routes; none of them loads a model except `load`."""

    swaps: ClassVar[bool] = True
    asked: ClassVar[frozenset[ModelStatus]] = frozenset({ModelStatus.LOADED})

    def __init__(self, base: str, *, api_key: str | None = None) -> None:
        super().__init__(base, api_key=api_key)
        self._told: dict[str, _Told] = {}  # by events, the last ones of an ended stream too
        self._starts: dict[str, int] = {}  # how often a model was seen to become ready
        self._ready: set[str] = set()
        self._others: set[str] = set()  # listed by an old version like models, but each loads another model

    async def listing(self, *, headers: Headers | None = None) -> Listing:
        """Return the models. Raises EngineError, EngineGoneError.

        While events report the models' names, only their states are asked for: llama-swap logs each request.
        """
        running = running_in(await self._http.json("GET", RUNNING, limits=QUICK, headers=headers))
        if running is None:
            raise EngineError(200, f"{RUNNING}: not llama-swap", foreign=True)
        named = dict[str, Mapping[str, Any]]()
        if not self.told:
            named = _named(await self._http.json("GET", "/v1/models", limits=QUICK, headers=headers))
            self._others &= named.keys()
        self._see({name for name, one in running.items() if one.get("state") == READY})
        aliases = {alias for one in self._told.values() for alias in one.aliases}
        models = {name for name, entry in named.items() if name not in aliases and _is_model(entry)}
        names = sorted((models | running.keys() | self._told.keys()) - self._others)
        self._starts = {name: starts for name, starts in self._starts.items() if name in names}
        return Listing(
            models=tuple(self._entry(name, named.get(name, {}), running.get(name)) for name in names), most=0
        )

    def _entry(self, name: str, said: Mapping[str, Any], running: Mapping[str, Any] | None) -> ModelEntry:
        status = STATES.get(str(running.get("state")), ModelStatus.UNLOADED) if running else None
        told = self._told.get(name)
        aliases = told.aliases if told else tuple(map(str, _about(said).get("aliases") or ()))
        return ModelEntry(
            name=ModelName(name),
            aliases=aliases,
            status=status or ModelStatus.UNLOADED,
            flags=flags_in(str(running.get("cmd", ""))) if running else None,
            port=self._starts.get(name, 0) if status else 0,
        )

    def _see(self, ready: set[str]) -> None:
        """Count the starts of models: another count means another process, with empty slots."""
        for name in ready - self._ready:
            self._starts[name] = self._starts.get(name, 0) + 1
        self._ready = set(ready)

    async def load(self, model: ModelName, *, headers: Headers | None = None) -> None:
        """Load a model by a harmless request to it; returns when it is ready or could not be loaded.

        The listing tells which. Raises EngineGoneError, and EngineError if the load was refused or was ended
        from outside: it may succeed if it is tried again.
        """
        path = EngineAddress(self.base, model, swaps=True).passed_on("/health", held=True)
        try:
            async with self._http.ask("GET", path, limits=LOAD, headers=headers) as response:
                await response.read()
        except EngineError as error:
            if error.status not in FAILED or any(word in error.message for word in ENDED):
                raise
            return
        if self.told:
            return
        with suppress(EngineError):
            running = running_in(await self._http.json("GET", RUNNING, limits=QUICK, headers=headers)) or {}
            if model not in running and model not in self._told and model not in self._starts:
                self._others.add(model)

    async def events(self, changed: Callable[[], object], *, headers: Headers | None = None) -> None:
        """Call `changed` at each change of a model's state, until llama-swap ends the stream.

        Raises EngineError, EngineGoneError; also if this version has no such stream.
        """
        async with self._http.ask("GET", "/api/events", limits=EVENTS, headers=headers) as response:
            try:
                async for data in _events(response.content.iter_any()):
                    if self._hear(data):
                        self.told = True
                        changed()
            finally:
                self.told = False
                self.ends += 1

    def _hear(self, data: bytes) -> bool:
        """Read an event. Returns whether it reports the models' states."""
        try:
            said = orjson.loads(data)
            if said["type"] != "modelStatus":
                return False
            models = [one for one in orjson.loads(said["data"]) if not one.get("peerID")]
            self._told = {str(one["id"]): _told(one) for one in models}
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            return False
        self._see({name for name, one in self._told.items() if one.state == READY})
        return True


def _told(one: Mapping[str, Any]) -> _Told:
    return _Told(state=str(one["state"]), aliases=tuple(map(str, one.get("aliases") or ())))


async def _events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of each event; an event that is longer than `LONGEST` is left out."""
    line, skipped = b"", False
    async for chunk in chunks:
        *ended, rest = chunk.split(b"\n")
        for end in ended:
            whole, line = line + end, b""
            if not skipped and whole.startswith(b"data:"):
                yield whole[5:].strip()
            skipped = False
        line += rest
        if len(line) > LONGEST:
            line, skipped = b"", True


def _is_model(entry: Mapping[str, Any]) -> bool:
    """Whether llama-swap can load this entry of its /v1/models as a model of its own."""
    about = _about(entry)
    return "peerID" not in about and about.get("type") not in NOT_MODELS


def _about(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    meta = entry.get("meta") or {}
    about = meta.get("llamaswap") if isinstance(meta, dict) else None
    return about if isinstance(about, dict) else {}


def flags_in(command: str) -> EngineFlags | None:
    """Return the flags of llama-server in a model's `cmd`; None if it starts something else, or a wrapper."""
    try:
        words = shlex.split(command, comments=True)
        at = next(n for n in range(len(words)) if starts(words, n))
        around = {word.rpartition("/")[2] for word in words[:at]}
        return None if CONTAINERS & around else EngineFlags.parse(words[at + 1 :])
    except (ValueError, StopIteration, FlagError):
        return None
