"""One request that takes a slot, from its first byte to the end of its answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import aiohttp
from aiohttp import web

from slotkeeper.core.effects import Forward
from slotkeeper.core.events import Arrived, Started
from slotkeeper.core.types import ClientId, EngineId, Reason
from slotkeeper.observe.log import get_logger
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime.driver import Driver
from slotkeeper.runtime.link import EngineLink
from slotkeeper.web.account import Account
from slotkeeper.web.upstream import GONE, NotSent, Upstream, abort, copy, prepared
from slotkeeper.wire import errors
from slotkeeper.wire import headers as names
from slotkeeper.wire.errors import UpstreamFault
from slotkeeper.wire.headers import request_id as safe_id
from slotkeeper.wire.progress import ProgressFilter, ask_for, can_ask
from slotkeeper.wire.request import pin
from slotkeeper.wire.routes import Api

PREDICTION_WAIT: Final = 0.05  # seconds that an answer's head may wait for our own prediction
AUTH: Final = ("Authorization", "X-Api-Key")

# Straight through, or over before its client could tire of it: no progress is asked for.
AS_IT_IS: Final = frozenset({Reason.BYPASS, Reason.BRIEF})
BRIEF_BYTES: Final = 512  # of a body: JSON, model name and all, that leaves about a hundred tokens

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Gate:
    """What every exchange needs."""

    driver: Driver
    upstream: Upstream
    metrics: Metrics


class Exchange:
    """Asks the driver for a place, forwards the bytes, and tells the driver how it ended."""

    def __init__(self, gate: Gate, request: web.Request, api: Api, body: bytes, request_id: str) -> None:
        self._gate = gate
        self._request = request
        self._api = api
        self._body = body
        self._auth = {name: request.headers[name] for name in AUTH if name in request.headers}
        self._account = Account(gate.driver, api, request_id, self._auth)
        self._account.conversation = safe_id(request.headers.get(names.CONVERSATION), str) or None

    async def run(self) -> web.StreamResponse:
        account = self._account
        if self._api.generates:
            account.parse(self._body)
        try:
            while True:
                forward = await self._place()
                try:
                    return await self._answer(forward)
                except NotSent:
                    if not await self._elsewhere(forward.engine):
                        raise
                    account.gone()
        except (asyncio.CancelledError, *GONE):
            account.outcome = "client_gone"
            raise
        except UpstreamFault:
            account.outcome = "upstream_error"
            raise
        finally:
            account.close()

    # -- the request -------------------------------------------------------------------------------

    async def _place(self) -> Forward:
        account, driver = self._account, self._gate.driver
        await driver.awake()
        renders = account.open()
        arrival = self._arrival(renders=renders)
        if not arrival.brief:
            account.render()
        forward = await driver.admit(arrival)
        if forward.reason is not Reason.BRIEF:  # whose tokens can wait until its answer is over
            account.render()
        self._gate.metrics.waited(driver.now() - account.arrived)
        return forward

    def _arrival(self, *, renders: bool) -> Arrived:
        ask, headers = self._account.ask, self._request.headers
        return Arrived(
            at=self._gate.driver.now(),
            request=self._account.key,
            client=self._client(),
            pinnable=ask is not None and self._api.pinnable,
            rendered=renders,
            id_slot=ask.id_slot if ask else None,
            copies=ask.copies if ask else 1,
            outline=ask.outline if ask and ask.cache_prompt else (),
            brief=self._api.pinnable and len(self._body) <= BRIEF_BYTES,
            adapted=ask is not None and ask.adapted,
            resumable="X-Conversation-Id" in headers,
            bypass=headers.get(names.BYPASS) == "1",
        )

    def _client(self) -> ClientId:
        """Who waits in line: an API key, else an address. Kept as a digest, never as it was sent."""
        who = next(iter(self._auth.values()), None) or self._request.remote or "?"
        return ClientId(blake2b(who.encode(errors="replace"), digest_size=8).hexdigest())

    async def _elsewhere(self, engine: EngineId) -> bool:
        """Whether the engine is really gone and another is there: then nobody has to hear of it."""
        driver = self._gate.driver
        if len(driver.links) == 1:
            return False
        return await driver.links[engine].is_gone() and driver.front.ready

    # -- the answer --------------------------------------------------------------------------------

    async def _answer(self, forward: Forward) -> web.StreamResponse:
        body, driver = self._body, self._gate.driver
        if forward.pin and forward.slot is not None:
            body = pin(body, forward.slot)
        ask, progress = self._account.ask, None
        if ask is not None and forward.reason not in AS_IT_IS and can_ask(ask, body):
            body, progress = ask_for(body), ProgressFilter()
        link = driver.links[forward.engine]
        try:
            answer = await self._gate.upstream.send(forward.engine, self._request, body, self._account.id)
        except UpstreamFault:
            link.kick()
            raise
        async with answer:
            driver.post(Started(at=driver.now(), request=self._account.key))
            if answer.status < 400:
                link.let_in(self._auth)
            return await self._relay(answer, forward, link, progress)

    async def _relay(
        self,
        answer: aiohttp.ClientResponse,
        forward: Forward,
        link: EngineLink,
        progress: ProgressFilter | None,
    ) -> web.StreamResponse:
        account = self._account
        streamed = answer.content_type == "text/event-stream" and "Content-Encoding" not in answer.headers
        response = prepared(answer, account.id)
        await self._label(response, forward)
        account.listen(answer)
        await response.prepare(self._request)
        try:
            if progress and streamed:
                await copy(answer, response, account.heard, progress.feed)
                await response.write(progress.close())
            else:
                await copy(answer, response, account.heard)
        except UpstreamFault as fault:
            link.kick()
            account.gone()
            await self._break_off(answer, response, fault)
            return response
        account.finished(forward, link, answer.status)
        await response.write_eof()
        return response

    async def _label(self, response: web.StreamResponse, forward: Forward) -> None:
        """Our own headers. The prediction is ready by now but for very short prompts."""
        account = self._account
        response.headers[names.DECISION] = forward.reason.value
        if forward.slot is not None:
            response.headers[names.SLOT] = str(forward.slot)
        pending = self._gate.driver.placement.pending(account.key)
        if pending and pending.predicted is None and not pending.rendered:
            try:
                async with asyncio.timeout(PREDICTION_WAIT):
                    await account.rendered.wait()
            except TimeoutError:
                return
        if pending and pending.predicted is not None:
            response.headers[names.PREDICTED] = str(pending.predicted)

    async def _break_off(
        self, answer: aiohttp.ClientResponse, response: web.StreamResponse, fault: UpstreamFault
    ) -> None:
        """Never a clean end: an error event where the client reads events, else a broken connection."""
        log.warning("answer_broke_off", request_id=self._account.id, error=fault.message)
        plain = "Content-Encoding" not in answer.headers and "Content-Length" not in answer.headers
        if plain and answer.content_type == "text/event-stream":
            await response.write(b"\n\n" + errors.sse(fault, self._api))
            await response.write_eof()
        else:
            abort(self._request)
