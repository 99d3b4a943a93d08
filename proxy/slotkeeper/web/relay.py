"""The engine's answer on its way to the client."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

import aiohttp
from aiohttp import web

from slotkeeper.api import errors
from slotkeeper.api.errors import UpstreamFault
from slotkeeper.api.progress import ProgressFilter
from slotkeeper.api.routes import Api
from slotkeeper.observe.log import get_logger
from slotkeeper.runtime.driver import Driver
from slotkeeper.runtime.link import EngineLink
from slotkeeper.scheduler.effects import Forward
from slotkeeper.web.account import Account
from slotkeeper.web.outlet import Outlet, ReadAhead
from slotkeeper.web.upstream import abort, answering, copy, flows, whole
from slotkeeper.web.waiting import Waiting

PREDICTION_WAIT: Final = 0.05  # seconds that an answer's head may wait for our own prediction

log = get_logger(__name__)


class Relay:
    """One answer: whole, retold as an event, or visibly broken off.

    Raises UpstreamFault where it breaks off and no byte of it is with the client.
    """

    def __init__(
        self,
        driver: Driver,
        request: web.Request,
        api: Api,
        account: Account,
        waiting: Waiting,
        *,
        ahead: ReadAhead,
    ) -> None:
        self._driver = driver
        self._ahead = ahead
        self._request = request
        self._api = api
        self._account = account
        self._waiting = waiting

    async def run(
        self,
        answer: aiohttp.ClientResponse,
        forward: Forward,
        link: EngineLink,
        progress: ProgressFilter | None,
        *,
        alone: bool,
    ) -> web.StreamResponse:
        """Copy the answer, behind our own head if that is out. The first event ends the waiting.

        `alone`: no comment of ours may stand between the engine's events.
        """
        account, waiting = self._account, self._waiting
        account.listener.begin(answer)
        await self._predicted()
        if waiting.opened is not None and not flows(answer):
            return await self._retell(answer, forward, link)
        response = await waiting.accept(answer)
        if not flows(answer):
            progress = None
        elif not alone:
            waiting.start()
        rest = account.listener.without(progress) if progress else bytes

        def heard(chunk: bytes) -> None:
            link.pulse.heard()
            account.listener.heard(chunk)

        with Outlet(self._ahead, self._request, response) as out:
            try:
                async with answering(link):
                    await copy(answer, out.write, heard, lambda chunk: waiting.ends_with(rest(chunk)))
                waiting.stop()
                if progress:
                    await out.write(progress.close())
            except UpstreamFault as fault:
                waiting.stop()
                link.kick()
                if not waiting.begun:  # the client sees nothing, if another engine can answer
                    raise
                account.gone()
                await self._break_off(answer, out, fault)
                return response
            account.finished(forward, link, answer.status)
            await out.end()
        return response

    async def _predicted(self) -> None:
        """The prediction is ready by now but for very short prompts, which may be given a moment."""
        pending = self._driver.placement.pending(self._account.key)
        if pending and pending.predicted is None and not pending.rendered:
            with suppress(TimeoutError):
                async with asyncio.timeout(PREDICTION_WAIT):
                    await self._account.rendered.wait()

    async def _retell(
        self, answer: aiohttp.ClientResponse, forward: Forward, link: EngineLink
    ) -> web.StreamResponse:
        """No stream came, and the client reads one by now: what the engine said, as an error event."""
        account = self._account
        try:
            async with answering(link):
                body = await whole(answer, account.listener.heard)
        except UpstreamFault:
            link.kick()
            raise
        account.finished(forward, link, answer.status)
        fault = errors.retold(answer.status, body)
        if answer.status < 400:
            account.outcome = "upstream_error"
            fault = UpstreamFault(f"the engine answered {answer.content_type} where a stream was asked for")
        return await self._waiting.end(errors.sse(fault, self._api))

    async def _break_off(self, answer: aiohttp.ClientResponse, out: Outlet, fault: UpstreamFault) -> None:
        """Never a clean end: an error event where the client reads events, else a broken connection."""
        log.warning("answer_broke_off", request_id=self._account.id, error=fault.message)
        if flows(answer):
            await out.write(b"\n\n" + errors.sse(fault, self._api))
            await out.end()
        else:
            abort(self._request)
