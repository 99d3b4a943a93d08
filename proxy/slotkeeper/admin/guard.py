"""Whom the admin port serves: clients with the token, no pages of other sites; and how it answers them.

A page may make its reader's browser send requests to loopback, and read the answers if a name of its own
leads there (DNS rebinding). So the name that was asked must be one of ours, and what changes something must
not come from another site.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import urlsplit

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler


def answer(document: Any) -> web.Response:
    return web.Response(body=orjson.dumps(document), content_type="application/json")


def refused(kind: type[web.HTTPError], why: str) -> web.HTTPError:
    """To be raised."""
    return kind(text=orjson.dumps({"error": why}).decode(), content_type="application/json")


def number(request: web.Request, name: str, default: int) -> int:
    """A query's number, at least 0. Raises 400."""
    text = request.query.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit():
        raise refused(web.HTTPBadRequest, f"{name} is a number, not {text[:20]!r}")
    return int(text[:9])


# -- who is served ---------------------------------------------------------------------------------------

SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
ELSEWHERE: Final = frozenset({"cross-site", "same-site"})  # Sec-Fetch-Site; same-site is another port, too
PROBES: Final = frozenset({"/livez", "/readyz", "/healthz"})


class Guard:
    """`hosts` are names besides those of loopback; an address in numbers cannot be rebound."""

    def __init__(self, token: str | None, hosts: Collection[str], open_: Collection[str]) -> None:
        """`open_` are paths that want no token."""
        self._token = token
        self._hosts = frozenset(host.lower().rstrip(".") for host in hosts)
        self._open = open_

    @web.middleware
    async def check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        host = request.headers.get("Host")
        if host is not None and request.path not in PROBES and not self._ours(host):
            name = _name(host) or "that"
            raise refused(web.HTTPForbidden, f"this port is not called {name}; --admin-host {name} allows it")
        if request.method not in SAFE and _from_elsewhere(request, host):
            raise refused(web.HTTPForbidden, "a page of another site asks for this; nothing was done")
        if self._token and request.path not in self._open:
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(errors="surrogateescape"), self._token.encode()):
                said = "this bearer token is not the right one" if given else "a bearer token is needed here"
                return web.json_response({"error": said}, status=401)
        return await handler(request)

    def _ours(self, host: str) -> bool:
        name = _name(host)
        if name == "localhost" or name.endswith(".localhost") or name in self._hosts:
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return True


async def private(_: web.Request, response: web.StreamResponse) -> None:
    """What is shown here belongs in no cache, and is what its type says."""
    response.headers.setdefault("X-Content-Type-Options", "nosniff")
    response.headers.setdefault("Cache-Control", "no-store")


def _from_elsewhere(request: web.Request, host: str | None) -> bool:
    if request.headers.get("Sec-Fetch-Site", "").lower() in ELSEWHERE:
        return True
    origin = request.headers.get("Origin")  # sent by every browser with what changes something
    return origin is not None and origin.lower().rpartition("://")[2] != (host or "").lower()


def _name(host: str) -> str:
    """Of HOST:PORT; "" where it is none."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""
