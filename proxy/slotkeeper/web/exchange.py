"""One request that takes a slot, from its first byte to the end of its answer."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import aiohttp
from aiohttp import web

from slotkeeper.core.effects import Forward
from slotkeeper.core.events import Arrived, Finished, Gone, Rendered, ReplyKnown, Started
from slotkeeper.core.tokens import Tokens
from slotkeeper.core.types import ClientId, RequestId
from slotkeeper.observe.log import get_logger
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime import render
from slotkeeper.runtime.driver import Driver
from slotkeeper.runtime.link import EngineLink
from slotkeeper.web.upstream import GONE, Upstream, abort, copy, prepared
from slotkeeper.wire import errors
from slotkeeper.wire import headers as names
from slotkeeper.wire.answer import Answer, AnswerReader
from slotkeeper.wire.errors import UpstreamFault
from slotkeeper.wire.request import Ask, NotOurs, parse, pin
from slotkeeper.wire.routes import Api

PREDICTION_WAIT: Final = 0.05  # seconds that an answer's head may wait for our own prediction
AUTH: Final = ("Authorization", "X-Api-Key")

log = get_logger(__name__)
_numbers = itertools.count(1)


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
        self._id = request_id
        self._key = RequestId(f"{next(_numbers)}:{request_id}")  # a client may send one id twice
        self._auth = {name: request.headers[name] for name in AUTH if name in request.headers}
        self._ask: Ask | None = None
        self._prompt: Tokens | None = None
        self._rendered = asyncio.Event()
        self._over = False
        self._outcome = "broken"
        self._arrived = gate.driver.now()
        self._first_token: float | None = None

    async def run(self) -> web.StreamResponse:
        driver = self._gate.driver
        grant = driver.admit(self._enter())
        try:
            forward = await grant
            self._gate.metrics.waited(driver.now() - self._arrived)
            return await self._answer(forward)
        except asyncio.CancelledError:
            self._outcome = "client_gone"
            raise
        except GONE:
            self._outcome = "client_gone"
            raise
        except UpstreamFault:
            self._outcome = "upstream_error"
            raise
        finally:
            self._end()

    # -- the request -------------------------------------------------------------------------------

    def _enter(self) -> Arrived:
        """Parse what can be parsed. A body that we cannot read goes through as it came."""
        request, driver = self._request, self._gate.driver
        try:
            self._ask = parse(self._api, self._body) if self._api.generates else None
        except NotOurs as why:
            log.info("unreadable_request", request_id=self._id, route=self._api.value, why=why.reason)
        self._gate.metrics.spent("parse", driver.now() - self._arrived)
        ask = self._ask
        renders = ask is not None and (ask.chat is not None or ask.prompt is not None)
        if ask and renders:
            driver.tasks.start(self._render(ask))
        return Arrived(
            at=self._arrived,
            request=self._key,
            client=self._client(),
            pinnable=ask is not None and self._api.pinnable,
            rendered=renders,
            id_slot=ask.id_slot if ask else None,
            copies=ask.copies if ask else 1,
            outline=ask.outline if ask and ask.cache_prompt else (),
            resumable="X-Conversation-Id" in request.headers,
            bypass=request.headers.get(names.BYPASS) == "1",
        )

    def _client(self) -> ClientId:
        """Who waits in line: an API key, else an address. Kept as a digest, never as it was sent."""
        who = next(iter(self._auth.values()), None) or self._request.remote or "?"
        return ClientId(blake2b(who.encode(), digest_size=8).hexdigest())

    async def _render(self, ask: Ask) -> None:
        driver, started = self._gate.driver, self._gate.driver.now()
        link = self._link()
        try:
            self._prompt = await render.prompt_of(link, ask, self._auth) if link else None
        except render.FAILURES as error:
            log.info("not_rendered", request_id=self._id, error=str(error))
            self._gate.metrics.fallback("render")
        finally:
            self._rendered.set()
            driver.post(Rendered(at=driver.now(), request=self._key, prompt=self._prompt))
        self._gate.metrics.spent("render", driver.now() - started)

    def _link(self) -> EngineLink | None:
        return next((link for link in self._gate.driver.links.values() if link.ready), None)

    # -- the answer --------------------------------------------------------------------------------

    async def _answer(self, forward: Forward) -> web.StreamResponse:
        body = self._body
        if forward.pin and forward.slot is not None:
            body = pin(body, forward.slot)
        link = self._gate.driver.links[forward.engine]
        try:
            answer = await self._gate.upstream.send(forward.engine, self._request, body, self._id)
        except UpstreamFault:
            link.kick()
            raise
        async with answer:
            self._gate.driver.post(Started(at=self._gate.driver.now(), request=self._key))
            if answer.status < 400:
                link.let_in(self._auth)
            return await self._relay(answer, forward, link)

    async def _relay(
        self, answer: aiohttp.ClientResponse, forward: Forward, link: EngineLink
    ) -> web.StreamResponse:
        response = prepared(answer, self._id)
        await self._label(response, forward)
        streamed = answer.content_type == "text/event-stream"
        reader = AnswerReader(self._api, stream=streamed, status=answer.status)
        plain = "Content-Encoding" not in answer.headers

        def seen(chunk: bytes) -> None:
            if plain:
                reader.feed(chunk)
                if self._first_token is None and reader.first_token():
                    self._first_token = self._gate.driver.now() - self._arrived

        await response.prepare(self._request)
        try:
            await copy(answer, response, seen)
        except UpstreamFault as fault:
            link.kick()
            self._outcome = "broken"
            await self._break_off(response, fault, streamed=streamed and plain)
            return response
        self._finished(reader.close(), forward, link, answer.status)
        await response.write_eof()
        return response

    async def _label(self, response: web.StreamResponse, forward: Forward) -> None:
        """Our own headers. The prediction is ready by now but for very short prompts."""
        response.headers[names.DECISION] = forward.reason.value
        if forward.slot is not None:
            response.headers[names.SLOT] = str(forward.slot)
        pending = self._gate.driver.placement.pending(self._key)
        if pending and not pending.rendered:
            try:
                await asyncio.wait_for(self._rendered.wait(), PREDICTION_WAIT)
            except TimeoutError:
                return
        if pending and pending.predicted is not None:
            response.headers[names.PREDICTED] = str(pending.predicted)

    async def _break_off(
        self, response: web.StreamResponse, fault: UpstreamFault, *, streamed: bool
    ) -> None:
        """Never a clean end: an error event where the client reads events, else a broken connection."""
        log.warning("answer_broke_off", request_id=self._id, error=fault.message)
        if streamed:
            await response.write(b"\n\n" + errors.sse(fault, self._api))
            await response.write_eof()
        else:
            abort(self._request)

    # -- the end -----------------------------------------------------------------------------------

    def _finished(self, answer: Answer, forward: Forward, link: EngineLink, status: int) -> None:
        figures, driver = answer.figures, self._gate.driver
        self._over = True
        self._outcome = "ok" if status < 400 else "client_error" if status < 500 else "upstream_error"
        if self._first_token is not None:
            self._gate.metrics.first_token.observe(self._first_token)
        self._log(answer, forward, status)
        driver.post(
            Finished(
                at=driver.now(),
                request=self._key,
                prompt_tokens=figures.prompt_tokens,
                cached=figures.cached,
                generated=figures.generated,
                slot=figures.slot,
            )
        )
        known = self._ask is not None and figures.generated and answer.complete and status < 400
        if known and answer.reply is not None:
            driver.tasks.start(self._learn_reply(answer, link))

    async def _learn_reply(self, answer: Answer, link: EngineLink) -> None:
        """Find the ids of the reply: the next turn's prompt will begin with them."""
        await self._rendered.wait()
        if self._ask is None or self._prompt is None or answer.reply is None:
            return
        try:
            tokens = await render.with_reply(
                link, self._ask, self._prompt, answer.reply, answer.figures.generated or 0, self._auth
            )
        except render.FAILURES as error:
            log.debug("reply_not_rendered", request_id=self._id, error=str(error))
            return
        if tokens is not None:
            driver = self._gate.driver
            driver.post(ReplyKnown(at=driver.now(), request=self._key, tokens=tokens))

    def _end(self) -> None:
        if not self._over:
            self._gate.driver.post(Gone(at=self._gate.driver.now(), request=self._key))
        self._gate.metrics.requests.labels(route=self._api.value, outcome=self._outcome).inc()

    def _log(self, answer: Answer, forward: Forward, status: int) -> None:
        figures = answer.figures
        log.info(
            "request",
            request_id=self._id,
            route=self._api.value,
            status=status,
            engine=forward.engine,
            slot=forward.slot,
            decision=forward.reason.value,
            prompt_tokens=figures.prompt_tokens,
            cached=figures.cached,
            generated=figures.generated,
            complete=answer.complete,
            error=answer.error,
            conversation=self._request.headers.get(names.CONVERSATION),
            seconds=round(self._gate.driver.now() - self._arrived, 4),
            first_token_seconds=round(self._first_token, 4) if self._first_token is not None else None,
        )
