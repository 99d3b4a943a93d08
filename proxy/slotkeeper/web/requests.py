"""The admin port's account of the last requests: `/api/requests` and `/api/requests/{id}`."""

from __future__ import annotations

from itertools import islice
from typing import Any, Final

from aiohttp import web

from slotkeeper.engine.client import EngineError, EngineGoneError
from slotkeeper.observe.log import get_logger
from slotkeeper.observe.why.record import PromptDivergence, Record
from slotkeeper.observe.why.shown import detail, summary
from slotkeeper.observe.why.words import FEW
from slotkeeper.runtime.driver import Driver
from slotkeeper.web.documents import answer, number, refused
from slotkeeper.web.moments import moment_of

LIMIT: Final = 50
MOST: Final = 500
NEWEST: Final = "last"

log = get_logger(__name__)


class RequestRoutes:
    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/api/requests", self._list),
            web.get("/api/requests/{id}", self._one),
        ]

    async def _list(self, request: web.Request) -> web.Response:
        """The newest first; `limit`, `conversation` and `repeated=1` choose among them."""
        most = min(MOST, number(request, "limit", LIMIT))
        conversation = number(request, "conversation", -1)
        found = (
            record
            for record in self._driver.journal
            if conversation in (-1, record.goes_on)
            and (request.query.get("repeated") != "1" or record.repeated > FEW)
        )
        return answer({"requests": [self._now(record) | summary(record) for record in islice(found, most)]})

    async def _one(self, request: web.Request) -> web.Response:
        wanted = request.match_info["id"]
        record = self._find(wanted)
        if record is None:
            kept = len(self._driver.journal)
            among = f"none of the last {kept} requests" if kept else "no request is kept, so none"
            raise refused(web.HTTPNotFound, f"{among} is called {wanted}")
        document = self._now(record) | detail(record, self._driver.journal.took_slot(record))
        if record.divergence and record.divergence.now:
            document["parting"]["text"] = await self._text(record, record.divergence)
        return answer(document)

    def _now(self, record: Record) -> dict[str, Any]:
        moment = moment_of(self._driver, record)
        return {"now": moment.shown() if moment else None}

    def _find(self, wanted: str) -> Record | None:
        if wanted == NEWEST:
            return next(iter(self._driver.journal), None)
        return self._driver.journal.find(wanted)

    async def _text(self, record: Record, divergence: PromptDivergence) -> dict[str, str] | None:
        """The words around the place, by the engine's own vocabulary; None where it does not answer."""
        link = next((link for link in self._driver.links.values() if link.engine == record.engine), None)
        if link is None:
            return None
        pieces = (
            divergence.now[: divergence.lead],
            divergence.was[divergence.lead :],
            divergence.now[divergence.lead :],
        )
        try:
            lead, was, now = [await link.client.detokenize(ids, headers=link.auth) for ids in pieces]
        except (EngineError, EngineGoneError) as error:
            log.debug("not_detokenized", request_id=record.request_id, error=type(error).__name__)
            return None
        return {"lead": lead, "was": was, "now": now}
