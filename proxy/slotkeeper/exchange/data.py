"""The data port: every route of llama-server, passed through byte for byte unless something must change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, Final
from urllib.parse import unquote

from aiohttp import HttpVersion11, web

from slotkeeper.api import errors
from slotkeeper.api import head as names
from slotkeeper.api.errors import ClientFault, Fault, OurFault, UpstreamFault
from slotkeeper.api.head import LOAD_MODEL, UNLOAD_ALL, UNLOAD_ONE, Api, classify, is_open
from slotkeeper.api.request import HEAVY, NotPlain, named_model, plain
from slotkeeper.engine.client import LOOP_STATUS
from slotkeeper.exchange.bodies import Body, Budget, Outlet
from slotkeeper.exchange.connections import Connections
from slotkeeper.exchange.credentials import READS, KeyCheck, Refusal
from slotkeeper.exchange.exchange import Exchange, Gate, Inbound
from slotkeeper.exchange.forwarding import (
    GONE,
    IN_A_CIRCLE,
    EngineAnswer,
    UpstreamAnswer,
    abort,
    answering,
    copy,
    flows,
    prepared,
    target,
)
from slotkeeper.exchange.streams import LastEvent, Lookup, within
from slotkeeper.observe.log import Seldom, get_logger
from slotkeeper.runtime.driver import Driver
from slotkeeper.runtime.engines import BEING_PROBED
from slotkeeper.runtime.link import EngineLink
from slotkeeper.scheduler.events import AdaptersChange, Arrived, Gone
from slotkeeper.scheduler.types import ModelName, RequestId

COUNTS_MESSAGES: Final = "/v1/messages/"  # Anthropic's API has one more route, which takes no slot
NO_STREAMS: Final = "this key has no resumable streams: it has limits, which hold for clients that stay"
BODY_LEFT: Final = frozenset({408, 413, 429})  # more of the body may still arrive
TAKES_SLOT: Final = frozenset({Api.TASK, *(api for api in Api if api.generates)})
ACTS: Final = frozenset({Api.CONTROL, Api.MODELS})  # on slots or models
JUDGED: Final = TAKES_SLOT | ACTS  # the engine must know the key of a client that calls these
ON_THEIR_WAY: Final = 10.0  # seconds in which tasks that were sent before a change of adapters must begin
PAUSE: Final = 0.01  # seconds between checks of these tasks

log = get_logger(__name__)


def _unchecked() -> UpstreamFault:
    return UpstreamFault(
        "no engine can check the key for this now; try again when llama-server is up",
        status=503,
        retry_after=1,
    )


def _unloaded_by(path: str, body: bytes | None) -> str | None:
    """Return the name of the model that a request loads or unloads; None: all models of llama-swap."""
    if path in UNLOAD_ALL:
        return None
    return path.removeprefix(UNLOAD_ONE) if path.startswith(UNLOAD_ONE) else named_model(body or b"") or ""


class DataPort:
    """Answers every request, by an exchange if it takes a slot, else by copying it through."""

    def __init__(
        self,
        gate: Gate,
        intake: Budget,
        connections: Connections,
        *,
        draining: Callable[[], bool] = lambda: False,
    ) -> None:
        """`draining`: whether load balancers, which ask this port for its health, should send no more."""
        self._gate = gate
        self._connections = connections
        self._intake = intake
        self._running: set[asyncio.Task[Any]] = set()
        self.cuts = False  # the end of this port cuts running answers off
        self._draining = draining
        self._seldom = Seldom(log)

    def __len__(self) -> int:
        """Return the number of requests that are being answered."""
        return len(self._running)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=self._intake.each)
        app.router.add_route("*", "/{path:.*}", self.handle)
        app.on_shutdown.append(self._shut)
        return app

    async def handle(self, request: web.Request) -> web.StreamResponse:
        task = asyncio.current_task()
        if task is None:
            raise AssertionError("a handler runs in a task")
        self._running.add(task)
        self._connections.begun(request.protocol)
        try:
            with Body(self._intake, request) as body:
                response = await self._handle(Inbound.of(request, self._gate.driver.now()), body)
        except asyncio.CancelledError:
            if request.writer.output_size:  # we cancelled it, if the client is still connected
                abort(request)
            raise
        finally:
            self._running.discard(task)
        if request.version < HttpVersion11 and response.content_length is None:
            response.force_close()  # aiohttp would keep the connection, whose end is the end of this answer
        return response

    async def _shut(self, _: web.Application) -> None:
        if self.cuts:
            for task in self._running:
                task.cancel()

    async def _handle(self, inbound: Inbound, incoming: Body) -> web.StreamResponse:
        gate, request = self._gate, inbound.request
        try:
            inbound.path = self._path(request)
            inbound.model, inbound.route = gate.driver.engines.route_at(inbound.path)
            inbound.api = classify(request.method, inbound.route)
            self._not_again(request)
            gate.door.admit(request, inbound.api, inbound.path, inbound.route)
            self._check_health(request, inbound.path)
            if inbound.api in JUDGED or inbound.of_streams:
                judged = await gate.door.judge(
                    request, since=inbound.arrived, later=inbound.api in TAKES_SLOT
                )
                if isinstance(judged, Refusal):
                    return self._refused(inbound, judged)
                inbound.judged = judged
            if inbound.api in TAKES_SLOT:
                gate.driver.announce()
            async with gate.door.counted(request, inbound.api) as counted:
                inbound.body = await incoming.read()
                if gate.driver.engines.routers and not inbound.model:
                    # llama-swap would load the model that a form names
                    inbound.model = gate.driver.engines.model_of_form(request.headers, inbound.body)
                if inbound.api in TAKES_SLOT:
                    return await Exchange(gate, inbound, incoming, counted).run()
                return await self._without_slot(inbound)
        except Fault as fault:
            return self._failed(inbound, fault)
        except GONE:
            return web.Response(status=499)  # the client is gone
        except Exception:
            log.exception("exchange_failed", request_id=inbound.id)
            return self._broken(inbound)

    async def _without_slot(self, inbound: Inbound) -> web.StreamResponse:
        """Answer a request that takes no slot of its own. Raises UpstreamFault.

        One that acts on slots or models is refused if no engine has judged its key.
        """
        if inbound.api in ACTS and inbound.judged is not KeyCheck.LET_IN:
            raise _unchecked()
        if inbound.api is Api.CONTROL:
            return await self._acted(inbound)
        if inbound.api is Api.MODELS:
            return await self._model_changed(inbound)
        link = await self._serving(inbound, inbound.model)
        if inbound.of_streams:
            return await self._streamed(inbound, link)
        changes = inbound.request.method == "POST" and unquote(inbound.route) == "/lora-adapters"
        async with _changing_adapters(self._gate.driver, link) if changes else nullcontext():
            return await self._passed_on(inbound, link)

    def _broken(self, inbound: Inbound) -> web.StreamResponse:
        """Answer after an unexpected error of our own."""
        self._gate.metrics.fallback("exchange")
        if inbound.request.writer.output_size:  # a second head would land in the middle of a body
            abort(inbound.request)
            return web.Response(status=499)
        return self._failed(inbound, OurFault("slotkeeper failed; its log says why"))

    def _refused(self, inbound: Inbound, refusal: Refusal) -> web.StreamResponse:
        log.info("request_refused", request_id=inbound.id, status=refusal.status, error="by the engine")
        self._gate.metrics.requests.labels(route=inbound.api.value, outcome="client_error").inc()
        return refusal.response(inbound.id)

    def _path(self, request: web.Request) -> str:
        """Return the path that is forwarded. Raises ClientFault if the engine might read another path."""
        path = target(request).partition("#")[0].partition("?")[0]
        if request.method in READS:
            return path
        try:
            return plain(path)
        except NotPlain as why:
            self._gate.metrics.refused(why.doubt)
            self._gate.metrics.requests.labels(route=Api.OTHER.value, outcome="client_error").inc()
            raise ClientFault(why.message) from why

    def _not_again(self, request: web.Request) -> None:
        """Refuse a request that has passed this sidecar before, in a loop. Raises UpstreamFault."""
        if self._gate.upstream.name in names.hops(request.headers):
            raise UpstreamFault(IN_A_CIRCLE, status=LOOP_STATUS)

    def _check_health(self, request: web.Request, path: str) -> None:
        """Fail health checks while draining, and until the engine is probed. Raises UpstreamFault.

        Requests that arrive are served: after the probe. Before the engine answers, its own answer says so.
        """
        if request.method == "OPTIONS" or not is_open(request.method, path):
            return
        if self._draining():
            raise UpstreamFault("draining: this sidecar is about to end", status=503)
        if self._gate.driver.engines.readiness() == (False, BEING_PROBED):
            raise UpstreamFault(BEING_PROBED, status=503)

    async def _serving(self, inbound: Inbound, model: ModelName) -> EngineLink:
        """Return the engine for a request without a slot: the first one that is ready.

        A request for a router's `model` waits until it is loaded: else the router would load it and evict
        another.
        """
        driver = self._gate.driver
        if driver.engines.routers and not model:
            model = driver.engines.model_of(await self._model_in(inbound.request, inbound.body))
        if not model:
            return driver.engines.front()
        key = RequestId(f"{next(driver.numbers)}:slotless")
        line = self._gate.door.caller(inbound.request).line
        arrived = Arrived(at=driver.now(), request=key, client=line, model=model, slotless=True)
        driver.engines.rouse(model)
        try:
            forward = await driver.admit(arrived)
        except asyncio.CancelledError:
            driver.post(Gone(at=driver.now(), request=key))
            raise
        return driver.links[forward.engine]

    async def _model_in(self, request: web.BaseRequest, body: bytes | None) -> str | None:
        """Return the model that a request names, as a router reads it: in a POST's body or a GET's query."""
        if request.method in READS:
            return request.query.get("model")
        if not body or len(body) <= HEAVY:
            return named_model(body or b"")
        with suppress(NotPlain):
            named = (await self._gate.weigher(Api.OTHER, body)).claim.model
            return named if isinstance(named, str) else None
        return None

    async def _streamed(self, inbound: Inbound, link: EngineLink) -> web.StreamResponse:
        """Read, look up or stop resumable streams of the client's own namespace."""
        let_in = inbound.judged is KeyCheck.LET_IN
        space = self._gate.door.stream_space(inbound.request, let_in=let_in)
        if space is None:
            raise ClientFault(NO_STREAMS, status=404) if let_in else _unchecked()
        if not space:
            return await self._passed_on(inbound, link)
        if inbound.request.method != "POST":
            inbound.body = None
            return await self._passed_on(inbound, link, path=within(space, target(inbound.request)))
        try:
            lookup = Lookup(space, inbound.body or b"")
        except NotPlain as why:
            raise ClientFault(why.message) from why
        inbound.body = lookup.body
        async with answering(link), await self._sent(inbound, link) as sent:
            answer = await UpstreamAnswer.of(sent)
        self._count(inbound, answer.status)
        if answer.status == 200:
            answer = replace(answer, body=lookup.answer(answer.body))
        return answer.response(inbound.id)

    async def _sent(self, inbound: Inbound, link: EngineLink, path: str | None = None) -> EngineAnswer:
        """Send a request without a slot. Raises UpstreamFault."""
        ids = self._gate.door.stream_ids(inbound.request, let_in=False)
        try:
            async with answering(link):
                return await self._gate.upstream.send(
                    link.address, inbound.request, inbound.body, inbound.id, stream_ids=ids, path=path
                )
        except UpstreamFault:
            link.kick()
            raise

    async def _passed_on(
        self, inbound: Inbound, link: EngineLink, *, path: str | None = None
    ) -> web.StreamResponse:
        """Copy the engine's answer. With a `path` of our own it is a resumed stream, which must be whole."""
        last, request = LastEvent(), inbound.request
        async with await self._sent(inbound, link, path) as answer:
            response = prepared(answer, inbound.id)
            await response.prepare(request)
            outcome = errors.outcome_by(answer.status)
            try:
                with Outlet(self._gate.ahead, request, response) as out:
                    async with answering(link):
                        await copy(answer, out.put, out.write, last.read if path else lambda _: None)
                    if path and flows(answer) and answer.status < 400 and not last.ends:
                        raise UpstreamFault("the resumed stream ends without its last event")  # noqa: TRY301
                    await out.end()
            except UpstreamFault as fault:
                log.warning("answer_broke_off", request_id=inbound.id, error=fault.message)
                abort(request)
                outcome = "broken"
        self._gate.metrics.requests.labels(route=inbound.api.value, outcome=outcome).inc()
        return response

    async def _model_changed(self, inbound: Inbound) -> web.StreamResponse:
        """Load or unload a router's model for a client, as in a swap of our own.

        Running answers end first, and the contents of slots are saved: a router and llama-swap wait for
        neither. A model of llama-server's router is loaded by us, so that it evicts none on its own.
        """
        path, engines = unquote(inbound.route), self._gate.driver.engines
        named = _unloaded_by(path, inbound.body)
        model = engines.model_of(named)
        router = engines.router_with(model, swaps=path in UNLOAD_ALL or path.startswith(UNLOAD_ONE))
        front = router.front if router else engines.front()
        if router is None or (named is not None and not model):
            return await self._passed_on(inbound, front)
        links = [link for link in router.loaded() if not model or link.address.model == model]
        if path == LOAD_MODEL and not links and (await self._serving(inbound, model)).up:
            return web.json_response({"success": True}, headers={names.REQUEST_ID: inbound.id})
        if path == LOAD_MODEL or not links:
            return await self._passed_on(inbound, front)
        log.info("models_unloaded_by_client", request_id=inbound.id, engine=[link.engine for link in links])
        async with self._gate.driver.membership.unloading(links, self._gate.drain_timeout):
            response = await self._passed_on(inbound, front)
            await router.unloaded(links)
        return response

    async def _acted(self, inbound: Inbound) -> web.StreamResponse:
        line = self._gate.door.caller(inbound.request).line
        response = await self._gate.actions.answer(
            inbound.request, inbound.body or b"", inbound.id, line, inbound.model
        )
        self._count(inbound, response.status)
        return response

    def _count(self, inbound: Inbound, status: int) -> None:
        self._gate.metrics.requests.labels(route=inbound.api.value, outcome=errors.outcome_by(status)).inc()

    def _failed(self, inbound: Inbound, fault: Fault) -> web.StreamResponse:
        said = inbound.secrets.hidden(fault.loggable)
        if isinstance(fault, ClientFault):
            log.info("request_refused", request_id=inbound.id, status=fault.status, error=said)
        else:
            say = self._seldom if fault.status == LOOP_STATUS else log  # each sidecar asks every second
            say.warning("request_failed", request_id=inbound.id, status=fault.status, error=said)
        headers = {names.REQUEST_ID: inbound.id, "Server": "slotkeeper"}
        if origin := inbound.request.headers.get(
            "Origin"
        ):  # as the engine: else a page cannot read the error
            headers["Access-Control-Allow-Origin"] = origin
        if fault.retry_after is not None:
            headers["Retry-After"] = str(fault.retry_after)
        response = web.Response(
            status=fault.status,
            body=errors.body(fault, Api.MESSAGES if COUNTS_MESSAGES in inbound.request.path else inbound.api),
            content_type="application/json",
            headers=headers,
        )
        if fault.status in BODY_LEFT:
            response.force_close()  # do not read the rest of the body
        return response


@asynccontextmanager
async def _changing_adapters(driver: Driver, link: EngineLink) -> AsyncIterator[None]:
    """Hold back all tasks of ours on the engine while the block changes its adapters.

    The engine continues from states of the old adapters (engine.md T12), so no task may begin until the new
    ones are known.
    """
    if not (link.traits and link.traits.adapters):
        yield
        return
    driver.post(AdaptersChange(at=driver.now(), engine=link.engine))
    exact = False
    try:
        exact = await _all_begun(driver, link)
        yield
    finally:
        driver.post(await link.see_adapters(announced=True, exact=exact))


async def _all_begun(driver: Driver, link: EngineLink) -> bool:
    """Wait until all sent tasks have begun, up to `ON_THEIR_WAY`. Return whether they have."""
    until = driver.now() + ON_THEIR_WAY
    while (table := driver.placement.tables.get(link.engine)) and table.on_their_way:
        if driver.now() > until:  # a sent task may begin before or after the change
            return False
        await asyncio.sleep(PAUSE)
    return True
