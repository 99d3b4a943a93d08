"""Routes of the admin port that drain and undrain an engine."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from slotkeeper.admin.guard import answer, refused
from slotkeeper.runtime.driver import Driver
from slotkeeper.runtime.link import EngineLink


def membership(driver: Driver, link: EngineLink) -> dict[str, Any]:
    """Return the document of an engine's address, labels and use."""
    table = driver.placement.tables.get(link.engine)
    return {
        "address": link.address.base,
        "labels": dict(link.labels),
        "draining": link.draining,
        "drained": driver.placement.drained(link.engine),
        "failing": table is not None and table.up and table.failing,
    }


class EngineRoutes:
    """`POST /api/drain` and `/api/undrain`. The body names the engine: {"engine": NAME}."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/api/drain", self._drain), web.post("/api/undrain", self._undrain)]

    async def _drain(self, request: web.Request) -> web.Response:
        return await self._set(request, drain=True)

    async def _undrain(self, request: web.Request) -> web.Response:
        return await self._set(request, drain=False)

    async def _set(self, request: web.Request, *, drain: bool) -> web.Response:
        members, word = self._driver.membership, _named(await request.read())
        link = members.find(word)
        if link is None:
            known = ", ".join(link.engine for link in self._driver.engines.upstreams)
            raise refused(web.HTTPNotFound, f"there is no engine {word[:100]!r}; there is {known}")
        members.drain(link, drain=drain)
        return answer({"engine": link.engine, **membership(self._driver, link)})


def _named(body: bytes) -> str:
    try:
        asked = orjson.loads(body)
    except orjson.JSONDecodeError:
        asked = None
    word = asked.get("engine") if isinstance(asked, dict) else None
    if not word or not isinstance(word, str):
        raise refused(web.HTTPBadRequest, 'the body must be {"engine": "NAME"}')
    return word
