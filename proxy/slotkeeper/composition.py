"""Builds parts of a sidecar from the settings: limits, connections, spans, and the snapshot store."""

from __future__ import annotations

import os
from collections.abc import Callable
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Final

from slotkeeper.api.request import HEAVY
from slotkeeper.exchange.bodies import Budget
from slotkeeper.exchange.connections import Connections, Network, Tls, raise_descriptors, room_for
from slotkeeper.observe.log import get_logger
from slotkeeper.observe.metrics import Metrics, SharedPart
from slotkeeper.runtime.heavy import COPIES
from slotkeeper.scheduler.budgets import UNLIMITED
from slotkeeper.scheduler.costs import Limits
from slotkeeper.settings import BudgetSize, Settings
from slotkeeper.store.store import Store
from slotkeeper.store.tiers import ColdTier
from slotkeeper.values import UsageError

if TYPE_CHECKING:
    from slotkeeper.observe.spans import Spans
    from slotkeeper.store.hints import Hints
    from slotkeeper.store.sealing import StoreKey

ADMIN_CONNECTIONS: Final = 128
ADMIN_CONNECTIONS_OF_ONE: Final = 32  # from one address; a browser opens six
ADMIN_HEAD_SECONDS: Final = 5.0
KEEPALIVE_SECONDS: Final = 75.0  # longer than usual proxies in front keep them (nginx: 60 s to upstreams)

log = get_logger(__name__)


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
    most = room_for(settings.max_connections, raise_descriptors())
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


# -- the snapshot store -------------------------------------------------------------------------------------


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
        from slotkeeper.store.objects import Objects  # noqa: PLC0415 - an extra
        from slotkeeper.store.shared import SharedStore  # noqa: PLC0415 - an extra
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
    from slotkeeper.store.sealing import KeyFileError, StoreKey  # noqa: PLC0415 - an extra

    try:
        return StoreKey.read(path)
    except KeyFileError as error:
        raise UsageError(f"--store-key-file: {error}") from error


def _hints(settings: Settings, metrics: Metrics) -> Hints | None:
    if settings.hints is None:
        return None
    try:
        from slotkeeper.store.hints import Hints  # noqa: PLC0415 - an extra
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
