"""Access control of the admin port: clients need the token, and pages of other sites are refused.

A web page can make a browser send requests to loopback. It can read the answers if its own host name resolves
to loopback (DNS rebinding). So the Host header must name this port, and a request that changes something must
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
    """Return an HTTP error for the caller to raise, with `why` in its JSON body."""
    return kind(text=orjson.dumps({"error": why}).decode(), content_type="application/json")


def field_of(body: bytes, name: str) -> Any:
    """Return a field of a JSON object; None if the body is no object or has no such field."""
    try:
        asked = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return asked.get(name) if isinstance(asked, dict) else None


def number(request: web.Request, name: str, default: int) -> int:
    """Return a number of the query, at least 0. Raises 400 for other text."""
    text = request.query.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit():
        raise refused(web.HTTPBadRequest, f"{name} is a number, not {text[:20]!r}")
    return int(text[:9])


# -- checks of a request ---------------------------------------------------------------------------------

SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
ELSEWHERE: Final = frozenset({"cross-site", "same-site"})  # Sec-Fetch-Site; same-site is another port, too
PROBES: Final = frozenset({"/livez", "/readyz", "/healthz"})


class Guard:
    """Middleware that checks the Host header, the origin and the token of each request.

    `hosts` are the port's names besides those of loopback. IP addresses always pass: they cannot be rebound.
    """

    def __init__(self, token: str | None, hosts: Collection[str], open_: Collection[str]) -> None:
        """`open_` are the paths that need no token."""
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
        if request.path not in self._open and (why := self._unauthorised(request)):
            return web.json_response({"error": why}, status=401)
        return await handler(request)

    def _unauthorised(self, request: web.Request) -> str:
        """Return why the request's bearer token is refused; "" if it is right, or if none is needed."""
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        right = self._token.encode() if self._token else b""
        if not right or hmac.compare_digest(given.encode(errors="surrogateescape"), right):
            return ""
        return "this bearer token is not the right one" if given else "a bearer token is needed here"

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
    """Forbid caching of the answer and guessing of its content type."""
    response.headers.setdefault("X-Content-Type-Options", "nosniff")
    response.headers.setdefault("Cache-Control", "no-store")


def _from_elsewhere(request: web.Request, host: str | None) -> bool:
    if request.headers.get("Sec-Fetch-Site", "").lower() in ELSEWHERE:
        return True
    origin = request.headers.get("Origin")  # every browser sends it with requests that change something
    return origin is not None and origin.lower().rpartition("://")[2] != (host or "").lower()


def _name(host: str) -> str:
    """Return the host in HOST:PORT; "" if the text is invalid."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""
