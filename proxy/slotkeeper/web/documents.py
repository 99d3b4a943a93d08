"""Documents and refusals of the admin port."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web


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
