"""Builds parts of a sidecar from the settings."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Final

from slotkeeper.exchange.connections import Connections, Network, Tls, raise_descriptors, room_for
from slotkeeper.exchange.outlet import ReadAhead
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime.cold_store import cold_room
from slotkeeper.scheduler.costs import Limits
from slotkeeper.settings import Settings

ADMIN_CONNECTIONS: Final = 128
KEEPALIVE_SECONDS: Final = 75.0  # longer than usual proxies in front keep them (nginx: 60 s to upstreams)


def limits_in(settings: Settings) -> Limits:
    return Limits(
        hot_bytes=int(settings.hot_bytes),
        cold_bytes=cold_room(settings),
        shared_bytes=int(settings.cold_store_bytes) if settings.cold_store else None,
        hourly_bytes=int(settings.hourly_bytes),
        pause=settings.save_pause,
        engine_wait=settings.engine_wait,
        swap_wait=settings.swap_wait,
        idle_tokens=settings.idle_tokens,
        waiting=settings.max_waiting,
        waiting_of_one=settings.max_waiting_per_client,
    )


def trusted_in(settings: Settings) -> tuple[Network, ...]:
    return tuple(ip_network(text, strict=False) for text in settings.trusted_proxies)


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
        of_one=ADMIN_CONNECTIONS,
        head_seconds=KEEPALIVE_SECONDS,
        tls=context,
    )
    return data, admin


def read_ahead_in(settings: Settings, metrics: Metrics) -> ReadAhead:
    return ReadAhead(
        int(settings.read_ahead_bytes),
        int(settings.read_ahead_total),
        seconds=settings.write_timeout,
        metrics=metrics,
    )
