"""The dashboard's own files, and the headers they are sent with. They hold no data, so no token is asked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler

PAGE: Final = "index.html"
ASSETS: Final = "/assets/"
TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
)
# Scripts, styles, the icon and the API come from here; nothing else comes from anywhere.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }
)


@dataclass(frozen=True, slots=True)
class Asset:
    path: str
    body: bytes
    content_type: str

    @property
    def etag(self) -> str:
        return hashlib.sha256(self.body).hexdigest()[:32]


def _assets() -> Iterator[Asset]:
    for file in sorted(files(__package__).joinpath("static").iterdir(), key=lambda file: file.name):
        path = "/" if file.name == PAGE else ASSETS + file.name
        yield Asset(path, file.read_bytes(), TYPES["." + file.name.rpartition(".")[2]])


_FILES: Final = tuple(_assets())
OPEN: Final = frozenset(asset.path for asset in _FILES)  # paths that want no token


def routes() -> list[web.RouteDef]:
    """The page at `/`, and what it loads below `/assets/`."""
    return [web.get(asset.path, _serving(asset)) for asset in _FILES]


def _serving(asset: Asset) -> Handler:
    etag = asset.etag

    async def serve(request: web.Request) -> web.StreamResponse:
        known = any(given.value in (etag, "*") for given in request.if_none_match or ())
        response = web.Response(status=304, headers=HEADERS) if known else _whole(asset)
        response.etag = etag
        return response

    return serve


def _whole(asset: Asset) -> web.Response:
    return web.Response(body=asset.body, content_type=asset.content_type, charset="utf-8", headers=HEADERS)
