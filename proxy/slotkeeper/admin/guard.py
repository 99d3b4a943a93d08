"""Access control of the admin port: clients need the token, and pages of other sites are refused.

A web page can make a browser send requests to loopback. It can read the answers if its own host name resolves
to loopback (DNS rebinding). So the Host header must name this port, and a request that changes something must
not come from another site.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection
from ipaddress import ip_address
from typing import Any, Final

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler
from yarl import URL


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
DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_HOST: Final = re.compile(r"[a-z0-9._-]+|[0-9a-f:.]+")  # a name, or an IPv6 address without its brackets
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
        if request.path not in PROBES:
            self._check_host(request)
        if request.method not in SAFE and _from_elsewhere(request):
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

    def _check_host(self, request: web.Request) -> None:
        """Raise 403 unless every name by which the request calls this port is one of its names.

        HTTP/1.0 clients may send no Host. A target with a host (`GET http://HOST/`) is checked as well.
        """
        called = request.headers.getall("Host", [])
        if not request.raw_path.startswith(("/", "*")):
            called = [*called, request.rel_url.raw_authority]
        for text in called:
            found = authority(text)
            if found is None:
                raise refused(
                    web.HTTPForbidden,
                    "the Host header is not NAME or NAME:PORT; call this port localhost, or by its address, "
                    "or by a name that --admin-host allows",
                )
            if not self._ours(found[0]):
                name = found[0]
                raise refused(
                    web.HTTPForbidden, f"this port is not called {name}; --admin-host {name} allows it"
                )

    def _ours(self, name: str) -> bool:
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


def _from_elsewhere(request: web.Request) -> bool:
    if request.headers.get("Sec-Fetch-Site", "").lower() in ELSEWHERE:
        return True
    origins = request.headers.getall("Origin", [])  # browsers send it with requests that change something
    return not all(same_site(origin, request.headers.get("Host", "")) for origin in origins)


def same_site(origin: str, host: str) -> bool:
    """Whether `origin`, in a browser's form (RFC 6454: SCHEME://HOST[:PORT]), is the site called `host`."""
    scheme, _, rest = origin.partition("://")
    page, ours, default = authority(rest), authority(host), DEFAULT_PORTS.get(scheme.lower())
    if page is None or ours is None or default is None:
        return False
    return (page[0], page[1] or default) == (ours[0], ours[1] or default)


def authority(text: str) -> tuple[str, int | None] | None:
    """Return the host, in lower case, and the port of HOST or HOST:PORT; None for any other text.

    The text is parsed as the authority of a URL and written again: if that is another text, it had a user, a
    path or anything else that parsers may read in different ways.
    """
    try:
        url = URL(f"http://{text}")
        host, port = url.raw_host or "", url.explicit_port
    except ValueError:
        return None
    written = f"[{host}]" if ":" in host else host
    if not _HOST.fullmatch(host) or text.lower() != (written if port is None else f"{written}:{port}"):
        return None
    return host.rstrip("."), port
