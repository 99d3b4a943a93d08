"""The sidecar as a whole: composes it, starts it, and ends it so that no answer is cut off."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aiohttp import web

from slotkeeper import system
from slotkeeper.addresses import MAX_ENGINES, NamedUpstream, UpstreamsError
from slotkeeper.admin.admin import AdminPort
from slotkeeper.api.request import HEAVY
from slotkeeper.conversation.naming import Naming
from slotkeeper.conversation.rules.apply import DEFAULTS
from slotkeeper.conversation.rules.base import Choice
from slotkeeper.engine.answers import Health
from slotkeeper.engine.client import EngineAddress
from slotkeeper.engine.flags import EngineFlags
from slotkeeper.exchange.bodies import Budget
from slotkeeper.exchange.connections import (
    DESCRIPTORS,
    Complaints,
    Connections,
    Network,
    Site,
    Tls,
    TlsError,
    room_for,
)
from slotkeeper.exchange.credentials import Door
from slotkeeper.exchange.data import DataPort
from slotkeeper.exchange.exchange import Gate
from slotkeeper.exchange.forwarding import Upstream
from slotkeeper.exchange.keys import KeysError, OwnKeys
from slotkeeper.exchange.slot_actions import SlotActions
from slotkeeper.observe.journal import Journal
from slotkeeper.observe.log import get_logger
from slotkeeper.observe.metrics import Metrics, SharedPart
from slotkeeper.observe.recording import Recorder
from slotkeeper.runtime.driver import Driver
from slotkeeper.runtime.engines import link_to
from slotkeeper.runtime.heavy import COPIES, Weigher
from slotkeeper.runtime.link import EngineLink
from slotkeeper.runtime.rewriting import Rewriting
from slotkeeper.runtime.tasks import Aside, Tasks
from slotkeeper.scheduler.snapshots.budgets import UNLIMITED, Limits
from slotkeeper.scheduler.types import EngineId
from slotkeeper.settings import BudgetSize, Settings
from slotkeeper.store.store import Store
from slotkeeper.store.tiers import ColdTier
from slotkeeper.values import Address, UsageError

if TYPE_CHECKING:
    from slotkeeper.observe.spans import Spans
    from slotkeeper.store.shared_store.hints import Hints
    from slotkeeper.store.shared_store.sealing import StoreKey

BEGUN: Final = 10  # turns of the event loop after which an accepted connection is served
BACKLOG: Final = 1024
ADMIN_CONNECTIONS: Final = 128
ADMIN_CONNECTIONS_OF_ONE: Final = 32  # from one address; a browser opens six
ADMIN_HEAD_SECONDS: Final = 5.0
KEEPALIVE_SECONDS: Final = 75.0  # longer than usual proxies in front keep them (nginx: 60 s to upstreams)
FOLLOW_SECONDS: Final = 2.0  # between looks at whether the engine has gone to another address
FOLLOW_MORE: Final = 1.5  # times the rest after each search without an engine
LONGEST_FOLLOW: Final = 10.0
OTHER_PORT: Final = "choose another --listen or --admin-listen, or end the process that has that port"

NEEDS_FOLDER: Final = (
    "/v1/messages will be refused to one key after requests of another: start llama-server with "
    "--slot-save-path DIR, and Slotkeeper with --slot-dir DIR"
)

Beside = Callable[[Mapping[EngineId, EngineLink]], Awaitable[None]]

log = get_logger(__name__)


class ListenError(Exception):
    """A port cannot be bound; the message says why and what to do."""


class Sidecar:
    """Both ports and everything behind them. Call `start`, and `close` at the end; `running` does both."""

    def __init__(self, settings: Settings, flags: Mapping[EngineId, EngineFlags] | None = None) -> None:
        """Compose the parts. Raises KeysError, TlsError, UpstreamsError and UsageError."""
        key = settings.engine_api_key.get_secret_value() if settings.engine_api_key else None
        self._engine_key = key
        token = settings.admin_token.get_secret_value() if settings.admin_token else None
        known = flags or {}
        self.settings = settings
        links = dict(
            link_to(one, self._new_link, known.get(EngineId(one.base))) for one in settings.engines()
        )
        self.metrics = Metrics()
        store = store_in(settings, self.metrics)
        limits = limits_in(settings)
        self.rewriting = Rewriting(Choice.of(settings.rules, DEFAULTS), self.metrics, text=settings.why_text)
        journal = Journal(settings.why_requests)
        self.driver = Driver(
            links,
            self.metrics,
            store=store,
            limits=limits,
            journal=journal,
            new_link=self._new_link,
            api_key=key,
        )
        self.admin = AdminPort(
            self.driver,
            self.metrics,
            token,
            limits,
            hosts=(*settings.admin_host, Address.parse(settings.admin_listen).host),
            why_text=settings.why_text,
        )
        self._keys = OwnKeys(settings.keys_file) if settings.keys_file else None
        self._recorder = (
            Recorder(settings.record, settings.record_bytes, lambda _: self.metrics.fallback("record"))
            if settings.record
            else None
        )
        self._spans = spans_to(settings.otlp_endpoint)
        self._ahead = Budget(
            each=settings.read_ahead_bytes,
            total=settings.read_ahead_total,
            seconds=settings.write_timeout,
            metrics=self.metrics,
        )
        self._aside = Aside()
        self._intake = intake_of(settings, self.metrics)
        self._tls = Tls(settings.tls_cert, settings.tls_key) if settings.tls_cert else None
        self._connections = connections_of(settings, self.metrics, self._tls)
        self._upstream: Upstream | None = None
        self._runners: list[web.AppRunner] = []
        self._data: web.AppRunner | None = None
        self._port: DataPort | None = None

    def _new_link(self, engine: EngineId, address: EngineAddress, flags: EngineFlags | None) -> EngineLink:
        settings = self.settings
        return EngineLink(
            engine,
            address=address,
            api_key=self._engine_key,
            flags=flags,
            slot_dir=settings.slot_dir,
            may_compute=settings.probe,
            may_read=settings.read_flags,
            frozen_after=settings.engine_frozen_after,
        )

    def _secret(self) -> bytes | None:
        """Return the secret of the snapshot folder; None until the folder is open."""
        snapshots = self.driver.snapshots
        return snapshots.store.secret if snapshots else None

    @property
    def addresses(self) -> list[str]:
        """host:port of the data port and of the admin port, as bound."""
        return ["{}:{}".format(*runner.addresses[0][:2]) for runner in self._runners]

    def _gate(self, upstream: Upstream) -> Gate:
        """Return the parts that handle each request of the data port."""
        settings = self.settings
        door = Door(
            self.driver,
            upstream,
            trusted=trusted_in(settings),
            keys=self._keys,
            namespaces={"key": True, "off": False}.get(settings.namespaces),
            secret=self._secret,
            had_namespaces=lambda: self.driver.placement.catalog.had_namespaces,
        )
        return Gate(
            self.driver,
            upstream,
            door,
            SlotActions(self.driver, upstream, allowed=lambda: not door.namespaces),
            self.metrics,
            self.rewriting,
            Naming(text=settings.why_text),
            settings.keep_alive,
            self._ahead,
            self._aside,
            Weigher(),
            settings.drain_timeout,
            recorder=self._recorder,
            spans=self._spans,
        )

    async def start(self) -> None:
        """Listen on both ports and start the driver. Raises ListenError if a port is taken."""
        settings, key = self.settings, self._engine_key
        ours = {"Authorization": f"Bearer {key}"} if key else {}
        self._upstream = Upstream(secrets.token_hex(8), ours if self._keys else None)
        gate = self._gate(self._upstream)
        data = self._port = DataPort(
            gate,
            self._intake,
            self._connections[0],
            draining=self.admin.draining,
        )
        complaints = Complaints(self.metrics)
        # Without handler_cancellation we do not notice a client that leaves during prefill.
        self._data = web.AppRunner(
            data.app(),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=settings.drain_timeout,
            keepalive_timeout=KEEPALIVE_SECONDS,
            auto_decompress=False,
            logger=complaints,
        )
        attended = self.admin.app()
        attended.middlewares.insert(0, self._connections[1].attend)
        admin = web.AppRunner(
            attended,
            access_log=None,
            shutdown_timeout=1.0,
            keepalive_timeout=KEEPALIVE_SECONDS,
            auto_decompress=False,
            logger=complaints,
        )
        self._runners = [self._data, admin]
        ports = zip(self._runners, (settings.listen, settings.admin_listen), self._connections, strict=True)
        for runner, listen, connections in ports:
            await runner.setup()
            address = Address.parse(listen)
            site = Site(runner, address.host, address.port, connections=connections, backlog=BACKLOG)
            try:
                await site.start()
            except OSError as error:
                raise ListenError(f"cannot listen: {error.strerror or error}; {OTHER_PORT}") from error
        self.driver.start()
        data_port, admin_port = self.addresses
        port = int(data_port.rpartition(":")[2])
        self.admin.listens(Address(Address.parse(settings.listen).host, port), settings.scheme)
        log.info("listening", data=data_port, admin=admin_port, upstream=list(self.driver.links))
        if gate.door.namespaces and settings.slot_dir is None:
            log.warning("namespaces_without_files", route="/v1/messages", advice=NEEDS_FOLDER)

    @property
    def reloads(self) -> bool:
        """Whether there are files to read again at SIGHUP."""
        return any((self._keys, self._tls, self.settings.upstreams_file))

    def reload(self) -> None:
        """Read keys, certificate and upstreams again. A file that cannot be used changes nothing."""
        if not self.reloads:
            log.info("nothing_to_reload", signal="SIGHUP")
        reloads = [files.reload for files in (self._keys, self._tls) if files]
        if self.settings.upstreams_file:
            reloads.append(lambda: self.driver.membership.change(self.settings.engines()))
        for reload in reloads:
            try:
                reload()
            except (KeysError, TlsError, UpstreamsError) as error:
                log.error("not_reloaded", error=str(error))  # noqa: TRY400 - the message says it all

    async def follow(self, search: Callable[[], Awaitable[str | None]]) -> None:
        """While no engine answers, search for one at another address, forever.

        A program that starts llama-server anew gives it another port. The old address is kept until the new
        one serves: requests wait for it.
        """
        engines, rest = self.driver.engines, FOLLOW_SECONDS
        while True:
            await asyncio.sleep(rest)
            rest = min(FOLLOW_MORE * rest, LONGEST_FOLLOW)
            links = [link for link in engines.upstreams if not link.draining]
            serving = [link for link in links if link.up or link.health.routes]
            if serving:
                rest = FOLLOW_SECONDS
            if serving and len(links) > 1:
                self._use(link.address.base for link in serving)
            elif all(link.health is Health.DOWN or link.health.wrong for link in links):
                base = await search()
                if base is not None and EngineId(base) not in engines.links:
                    log.info("upstream_moved", url=base)
                    self._use([*(link.address.base for link in links), base])

    def _use(self, bases: Iterable[str]) -> None:
        """Use the last of these addresses, as many as one sidecar may have."""
        last = list(bases)[-MAX_ENGINES:]
        self.driver.membership.change(tuple(NamedUpstream(base, base) for base in last))

    @property
    def answering(self) -> int:
        """The number of requests on the data port that are being answered."""
        return len(self._port) if self._port else 0

    async def drain(self, *, delay: float) -> None:
        """Become unready, wait `delay` seconds, stop accepting, let running answers finish, save slots."""
        self.admin.drain()
        log.info("draining", delay=delay, timeout=self.settings.drain_timeout, answers=self.answering)
        await asyncio.sleep(delay)
        if self._data is not None:
            await _end(self._data)
        await self.driver.save_all(
            self.settings.save_timeout, evacuate=self.settings.evacuate and cold_room(self.settings) != 0
        )

    def hurry(self) -> None:
        """Let `close` cut running answers off instead of waiting for their end."""
        if self._port is not None:
            self._port.cuts = True

    async def close(self) -> None:
        """Stop both ports and the driver, and write or send what is queued of recordings and spans."""
        for runner in self._runners:
            await _end(runner)
        await self.driver.close()
        self._aside.close()
        for sink in (self._recorder, self._spans):
            if sink is not None:
                await sink.close()


async def _end(runner: web.AppRunner) -> None:
    """Stop listening, let running answers finish, and end the runner.

    aiohttp's cleanup closes idle connections. A connection that was just accepted is not idle yet, so cleanup
    would wait for it, without any request, for the whole timeout. Some turns of the event loop prevent that.
    """
    for site in list(runner.sites):
        await site.stop()
    for _ in range(BEGUN):
        await asyncio.sleep(0)
    await runner.cleanup()


@asynccontextmanager
async def running(
    settings: Settings, flags: Mapping[EngineId, EngineFlags] | None = None
) -> AsyncIterator[Sidecar]:
    """Run a sidecar inside the block."""
    async with started(Sidecar(settings, flags)) as sidecar:
        yield sidecar


@asynccontextmanager
async def started(sidecar: Sidecar) -> AsyncIterator[Sidecar]:
    """Run this sidecar inside the block."""
    try:
        await sidecar.start()
        yield sidecar
    finally:
        await sidecar.close()


class Signals:
    """SIGTERM and SIGINT: the first signal asks for an orderly end, the second ends the sidecar at once.

    SIGHUP never ends it: it would end without saving. It reads files again, if there are any.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.now = asyncio.Event()
        self.urgent = False  # SIGINT from a terminal: do not wait for load balancers

    def install(self, hung_up: Callable[[], None]) -> None:
        """Handle SIGTERM and SIGINT; at SIGHUP call `hung_up`."""
        loop = asyncio.get_running_loop()
        if system.HANG_UP is not None:
            system.on_signal(loop, system.HANG_UP, hung_up)
        for number in system.ENDS:
            system.on_signal(loop, number, partial(self._signalled, number))

    def _signalled(self, number: signal.Signals) -> None:
        if self.asked.is_set():
            self.now.set()
        self.urgent = number is signal.SIGINT
        self.asked.set()


async def serve(
    settings: Settings,
    flags: Mapping[EngineId, EngineFlags] | None = None,
    *,
    beside: Beside | None = None,
    listening: Callable[[str, str], None] | None = None,
    waiting: Callable[[int], None] | None = None,
    search: Callable[[], Awaitable[str | None]] | None = None,
) -> None:
    """Serve until a signal, or until `beside` ends.

    `beside` (the supervised engine) runs at the same time and gets the links to the engines; its error is
    raised here. `listening` is called with HOST:PORT of the data port and of the admin port, as bound.
    `waiting` is called at the first SIGINT, with the number of answers whose end the sidecar waits for.
    `search` finds the engine anew when it has gone (`Sidecar.follow`).
    """
    signals = Signals()
    tasks = Tasks(lambda _: None)  # failures are raised below
    sidecar = Sidecar(settings, flags)
    signals.install(sidecar.reload)
    async with started(sidecar):
        if listening:
            listening(*sidecar.addresses)
        gc.freeze()  # modules stay, and looking at them takes most of a full collection, which stops the loop
        try:
            if search:
                tasks.start(sidecar.follow(search))
            companion = tasks.start(_run(beside, sidecar.driver.links))
            await _first(companion, tasks.start(_wait(signals.asked)))
            if companion.done():
                companion.result()
            delay = 0.0 if signals.urgent else settings.drain_delay
            if signals.urgent and waiting:
                waiting(sidecar.answering)
            draining = tasks.start(sidecar.drain(delay=delay))
            await _first(draining, tasks.start(_wait(signals.now)))
            if hurried := not draining.done():
                sidecar.hurry()
            log.info("stopped", hurried=hurried)
        finally:
            await tasks.close()


async def _first(*tasks: asyncio.Task[None]) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def _run(beside: Beside | None, links: Mapping[EngineId, EngineLink]) -> None:
    if beside is None:
        await asyncio.Event().wait()
    else:
        await beside(links)


# -- parts that follow from the settings -----------------------------------------------------------------


def limits_in(settings: Settings) -> Limits:
    return Limits(
        hot_bytes=_set(settings.hot_bytes),
        cold_bytes=cold_room(settings),
        shared_bytes=int(settings.cold_store_bytes) if settings.cold_store else None,
        hourly_bytes=_set(settings.hourly_bytes),
        pause=settings.save_pause,
        engine_wait=settings.engine_wait,
        swap_wait=settings.swap_wait,
        idle_tokens=settings.idle_tokens,
        running=settings.max_running,
        delay_factor=settings.max_delay_factor,
        waiting=settings.max_waiting,
        waiting_of_one=settings.max_waiting_per_client,
    )


def _set(size: BudgetSize) -> int | None:
    return None if size == "auto" else int(size)


def trusted_in(settings: Settings) -> tuple[Network, ...]:
    return tuple(ip_network(text, strict=False) for text in settings.trusted_proxies)


def intake_of(settings: Settings, metrics: Metrics) -> Budget:
    """Return the memory for bodies of requests, with a reserve for reading a heavy one."""
    each, total = int(settings.max_body_bytes), settings.all_bodies_bytes
    reserve = min(COPIES * each, total // 2) if min(each, total // 2) > HEAVY else 0
    return Budget(each=each, total=total, seconds=settings.body_timeout, metrics=metrics, reserve=reserve)


def connections_of(
    settings: Settings, metrics: Metrics, tls: Tls | None = None
) -> tuple[Connections, Connections]:
    """Return the connection limits of the data port and of the admin port."""
    context = tls.context if tls else None
    most = room_for(settings.max_connections, system.raise_descriptors(DESCRIPTORS))
    data = Connections(
        metrics,
        most=most,
        of_one=settings.max_connections_per_address,
        head_seconds=settings.head_timeout,
        trusted=trusted_in(settings),
        tls=context,
    )
    admin = Connections(
        metrics,
        most=ADMIN_CONNECTIONS,
        of_one=ADMIN_CONNECTIONS_OF_ONE,
        head_seconds=ADMIN_HEAD_SECONDS,
        tls=context,
        replaces=True,
    )
    return data, admin


# -- spans of requests ----------------------------------------------------------------------------------

DISABLED: Final = "OTEL_SDK_DISABLED"


def spans_to(endpoint: str) -> Spans | None:
    """Return the sender of spans; None without an endpoint, or if OTEL_SDK_DISABLED is true.

    Raises UsageError if the extra `otel` is not installed.
    """
    if not endpoint or os.environ.get(DISABLED, "").strip().lower() == "true":
        return None
    try:
        from slotkeeper.observe.spans import Spans  # noqa: PLC0415 - takes half a second, and needs an extra
    except ModuleNotFoundError as error:
        raise UsageError(f"otlp_endpoint needs: pip install 'slotkeeper[otel]' ({error})") from error
    return Spans(endpoint)


# -- the snapshot store ----------------------------------------------------------------------------------


def store_in(settings: Settings, metrics: Metrics) -> Store | None:
    """Return the store; None without a slot folder.

    Raises UsageError if settings contradict each other, an extra is missing, or a value cannot be used.
    """
    if settings.cold_store and settings.cold_dir:
        raise UsageError("--cold-store replaces --cold-dir: name one of them")
    if settings.cold_store and settings.slot_dir is None:
        raise UsageError("--cold-store needs --slot-dir, the folder that the engine writes and reads")
    if not settings.cold_store and (settings.hints or settings.store_key_file):
        raise UsageError("--hints and --store-key-file need --cold-store")
    if settings.slot_dir is None:
        return None
    cold: Path | ColdTier | None = settings.cold_dir
    if settings.cold_store:
        cold = _shared(settings, metrics)
    return Store(settings.slot_dir, cold)


def cold_room(settings: Settings) -> int | None:
    """Return the bytes of the cold tier that the scheduler may fill; None: they follow the disk.

    A shared store has no limit here: it is kept within its budget by its own collector.
    """
    if settings.cold_store:
        return UNLIMITED
    return _set(settings.cold_bytes) if settings.cold_dir else 0


def _shared(settings: Settings, metrics: Metrics) -> ColdTier:
    try:
        from slotkeeper.store.shared_store.objects import Objects  # noqa: PLC0415 - an extra
        from slotkeeper.store.shared_store.shared import SharedStore  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise UsageError(f"--cold-store needs: pip install 'slotkeeper[s3]' ({error})") from error
    key, hints = _key(settings.store_key_file), _hints(settings, metrics)
    try:
        objects = Objects(settings.cold_store, _watched("store", metrics))
    except ValueError as error:
        raise UsageError(f"--cold-store: {settings.cold_store} cannot be used: {error}") from error
    return SharedStore(objects, key, hints)


def _key(path: Path | None) -> StoreKey | None:
    if path is None:
        return None
    from slotkeeper.store.shared_store.sealing import KeyFileError, StoreKey  # noqa: PLC0415 - an extra

    try:
        return StoreKey.read(path)
    except KeyFileError as error:
        raise UsageError(f"--store-key-file: {error}") from error


def _hints(settings: Settings, metrics: Metrics) -> Hints | None:
    if settings.hints is None:
        return None
    try:
        from slotkeeper.store.shared_store.hints import Hints  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise UsageError(f"--hints needs: pip install 'slotkeeper[hints]' ({error})") from error
    try:
        return Hints(settings.hints.get_secret_value(), settings.cold_store, _watched("hints", metrics))
    except ValueError as error:
        raise UsageError("--hints: not a URL such as redis://HOST:6379/0") from error


def _watched(part: SharedPart, metrics: Metrics) -> Callable[[bool, str], None]:
    """Return a callback that logs and counts when this part of the shared store fails or works again."""
    metrics.shared_up.labels(part=part).set(1)

    def changed(up: bool, why: str) -> None:
        metrics.shared_up.labels(part=part).set(up)
        if up:
            log.info("shared_back", part=part)
        else:
            metrics.shared_losses.labels(part=part).inc()
            log.warning("shared_lost", part=part, why=why)

    return changed
