"""One request that takes a slot, from its body to the end of its answer."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Self

import aiohttp
from aiohttp import web

from slotkeeper.api import errors
from slotkeeper.api import head as names
from slotkeeper.api.answers.answer import Answer, ProgressFilter, comment
from slotkeeper.api.answers.assembling import Assembler, WholeAnswer, as_stream
from slotkeeper.api.document import Doc
from slotkeeper.api.errors import ClientFault, Fault, UpstreamFault
from slotkeeper.api.head import Api, Secrets, takes_form
from slotkeeper.api.head import request_id as safe_id
from slotkeeper.api.request import (
    HEAVY,
    PROGRESS_ROUTES,
    Ask,
    Asked,
    NotPlain,
    ask_for,
    can_ask,
    can_assemble,
    chat_of,
    is_large,
    placed,
    uncached,
)
from slotkeeper.conversation.naming import Naming
from slotkeeper.engine.answers import EngineError, EngineGoneError
from slotkeeper.exchange.account import Account
from slotkeeper.exchange.bodies import SENT, Body, Budget, Outlet
from slotkeeper.exchange.door import ANYONE, Door, KeyCheck, Refusal
from slotkeeper.exchange.keys import CROWDED, Counted, CrowdedFault
from slotkeeper.exchange.slot_actions import SlotActions
from slotkeeper.exchange.streams import is_stream_route
from slotkeeper.exchange.upstream import (
    EVENT_STREAM,
    GONE,
    NotSent,
    Upstream,
    abort,
    answering,
    copy,
    flows,
    prepared,
    whole,
)
from slotkeeper.observe.log import get_logger
from slotkeeper.observe.metrics import Metrics
from slotkeeper.observe.recording import Recorder
from slotkeeper.runtime.driver import Driver
from slotkeeper.runtime.heavy import Weigher
from slotkeeper.runtime.link import EngineLink
from slotkeeper.runtime.rewriting import Rewriting
from slotkeeper.runtime.tasks import Aside, Runner, Tasks, here
from slotkeeper.scheduler.effects import Forward
from slotkeeper.scheduler.events import Arrived, Exceeded, Started
from slotkeeper.scheduler.types import (
    NO_ROUTER,
    WITHOUT_PLACE,
    Crowded,
    EngineId,
    ModelName,
    Reason,
    RequestHints,
    RequestId,
)

if TYPE_CHECKING:
    from slotkeeper.observe.spans import Spans  # of an extra


RETRY_AFTER: Final = 5  # seconds
MIXED: Final = (
    "this route cannot be kept apart from requests of other keys or adapters now; try again, or use "
    "/v1/chat/completions"
)
NEVER_APART: Final = (
    "this route cannot be kept apart from requests of other keys or adapters here; use "
    "/v1/chat/completions, or have the operator start llama-server with --slot-save-path and Slotkeeper "
    "with that folder as --slot-dir"
)
DEATHS: Final = 3  # engines that ended while working on a request, after which it is not sent again
AT_WORK: Final = 0.01  # seconds after which the engine works on a request that was sent
# The same for a stream: its client hears the first token. The engine makes the prompt before it computes it,
# and a rendering of ours at that moment competes with it for the processor.
STREAM_AT_WORK: Final = 0.05
BRIEF_BYTES: Final = 512  # bytes of a body: less JSON and model name, about a hundred tokens

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Gate:
    """The parts that every exchange needs."""

    driver: Driver
    upstream: Upstream
    door: Door
    actions: SlotActions
    metrics: Metrics
    rewriting: Rewriting
    names: Naming
    keep_alive: float  # seconds between comments to a client that waits for a stream
    ahead: Budget
    aside: Aside
    weigher: Weigher
    drain_timeout: float  # seconds that running answers get before a client's request unloads their model
    recorder: Recorder | None = None
    spans: Spans | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Inbound:
    """A client's request, as far as the data port has read it."""

    request: web.Request
    id: str  # the client's own request id, if it is valid and shows no credential; else a new one
    secrets: Secrets  # its credentials, which are never recorded
    arrived: float  # seconds on the driver's clock; a wait for an engine counts from there
    path: str = ""  # that is forwarded, without its query
    route: str = ""  # the path at the engine's own server: llama-swap's paths may begin with a model
    model: ModelName = NO_ROUTER  # of a router, if path or form name it
    api: Api = Api.OTHER
    judged: KeyCheck = KeyCheck.LET_IN
    body: bytes | None = None  # None: it has none

    @classmethod
    def of(cls, request: web.Request, arrived: float) -> Self:
        secrets = Secrets.of(request.headers, request.query_string)
        given = request.headers.get(names.REQUEST_ID)
        if given is not None and secrets.stand_in(given):
            given = None
        known_as = safe_id(given, lambda: uuid.uuid4().hex)
        return cls(request=request, id=known_as, secrets=secrets, arrived=arrived)

    @property
    def of_streams(self) -> bool:
        """Whether it reads, looks up or stops resumable streams."""
        other = self.api is Api.OTHER and self.request.method != "OPTIONS"
        return other and is_stream_route(self.route)


class Exchange:
    """Asks the driver for a slot, forwards the request, and reports its end to the driver."""

    def __init__(self, gate: Gate, inbound: Inbound, incoming: Body, counted: Counted | None) -> None:
        """`incoming` is the memory of the body. `counted` counts the request for its key.

        If no engine could judge the credential, the request passes through without any work for it.
        """
        self._gate = gate
        self._inbound = inbound
        self._incoming = incoming
        self._counted = counted
        self._form = takes_form(inbound.path)
        self._body = self._body_out = inbound.body or b""  # as it came, and the form that is sent
        self._caller = gate.door.caller(inbound.request)
        self._let_in = inbound.judged is not KeyCheck.UNSURE
        self._namespace = self._caller.namespace or (ANYONE if gate.door.namespaces and self._let_in else "")
        self._asks_bypass = inbound.request.headers.get(names.BYPASS) == "1"
        # Whether it passes straight through: its client asked for that, or its key could not be checked.
        self._bypasses = self._asks_bypass or not self._let_in
        self._hears_comments = False  # its client asked for a stream and not for bypass
        self._stream_ids: tuple[str, ...] = ()  # that the engine gets
        known = inbound.secrets.without(
            inbound.request.headers
        )  # no credentials in a session's name or the like
        self._trace = gate.spans.begin(known) if gate.spans else None
        self._account = Account(
            gate.driver,
            inbound.api,
            inbound.id,
            gate.door.lent(inbound.request),
            known,
            secrets=inbound.secrets,
            client=gate.door.program_of(inbound.request),
            conversation=safe_id(known.get(names.CONVERSATION), str) or None,
            names=gate.names,
        )
        if key := self._caller.key:
            self._account.key_name = key.name
            self._account.charge.limited = key.tokens_per_minute is not None and not self._form
        tasks, labels = gate.driver.tasks, self._labels
        self._waiting = Waiting(inbound.request, inbound.id, tasks, seconds=gate.keep_alive, labels=labels)
        self._waits_since = inbound.arrived
        self._forward: Forward | None = None  # the decision, once it is made
        self._settled = False
        self._deaths = 0  # engines that ended while working on it
        self._outgrown = False  # an engine had no free cells for it

    async def run(self) -> web.StreamResponse:
        account = self._account
        try:
            account.asked = Asked.by(self._inbound.request.headers)
            if not self._form:
                await self._understand()
            ask = account.forms.ask
            self._hears_comments = ask is not None and ask.stream and not self._asks_bypass
            if self._hears_comments:
                self._waiting.start()
            return await self._served()
        except (asyncio.CancelledError, *GONE):
            account.outcome = "client_gone"
            raise
        except Fault as fault:
            account.outcome = errors.outcome_of(fault)
            if self._waiting.opened is None:
                raise
            account.gone()
            said = self._inbound.secrets.hidden(fault.loggable)
            log.warning("request_failed", request_id=account.id, status=fault.status, error=said)
            return await self._waiting.end(errors.sse(fault, self._inbound.api))
        finally:
            self._waiting.stop()
            account.close()
            if self._counted is not None:
                self._charge(self._counted)
            self._settle()
            if self._trace:
                self._trace.end(account.record)

    def _charge(self, counted: Counted) -> None:
        """Charge the key for the request. It counts on if its client left while an engine works for it."""
        account = self._account
        counted.cost = account.charge.tokens
        if account.charge.left and self._forward is not None:
            counted.stays(partial(self._gate.driver.when_released, account.key), account.charge.of_rest)

    async def _understand(self) -> None:
        """Parse the body. Raises ClientFault if the engine might read it differently, or for large values."""
        run = self._gate.aside if is_large(self._body) else here
        encoding, model = (
            ",".join(self._inbound.request.headers.getall("Content-Encoding", [])),
            self._inbound.model,
        )
        try:
            if len(self._body) > HEAVY:
                weighed = await self._account.weigh(self._body, encoding, self._gate.weigher, model)
                if not self._inbound.api.generates or not weighed.readable:
                    self._incoming.extend(SENT)
                    return  # forwarded with its claim
            if self._inbound.api.generates and self._let_in:
                rewriting = None if self._asks_bypass else self._gate.rewriting
                self._incoming.extend()
                await self._account.parse(self._body, rewriting, encoding=encoding, run=run, model=model)
            else:
                await self._account.understand(self._body, encoding, run=run)
        except NotPlain as why:
            self._gate.metrics.refused(why.doubt)
            raise ClientFault(why.message) from why

    async def _served(self) -> web.StreamResponse:
        """Send the request; send it again if its engine ends before the client has a byte of the answer."""
        while True:
            self._forward = forward = await self._place()
            losses = self._gate.driver.links[forward.engine].losses
            try:
                return await self._answer(forward, losses)
            except (OutOfCells, NotAssembled) as why:
                self._outgrown = self._outgrown or isinstance(why, OutOfCells)
            except UpstreamFault as fault:
                if not await self._again(forward.engine, losses, fault):
                    raise
                log.info(
                    "sent_again", request_id=self._account.id, engine=forward.engine, error=fault.loggable
                )
                self._gate.metrics.sent_again.inc()
            self._waits_since = self._gate.driver.now()
            self._account.gone()
            self._forward = None
            if self._hears_comments:
                self._waiting.start()

    def _settle(self) -> None:
        """Report and record the request, once. Nothing that is sent to the engine depends on it."""
        if self._settled or not self._inbound.api.generates:
            return
        self._settled = True
        self._account.notes.settle()
        if self._let_in and self._gate.recorder is not None:  # `--record`
            record = self._account.record
            self._gate.recorder.write(
                path=self._inbound.request.path_qs,
                headers=self._inbound.request.headers,
                body=self._body,
                client=record.client,
                session=record.named or record.conversation,
                at=record.received,
                parsed=self._account.parsed,
            )

    # -- the request -------------------------------------------------------------------------------

    async def _place(self) -> Forward:
        account, driver = self._account, self._gate.driver
        engines = driver.engines
        engines.rouse(account.model)
        if not engines.front(account.model).ready:
            account.waits()
        hints = account.hints(self._waits_since)
        await engines.awake(self._waits_since, account.model, hints.start_by)
        account.model = self._inbound.model or await engines.newest_model_of(account.claim.model)
        engines.rouse(account.model)
        if self._inbound.judged is KeyCheck.LATER:
            await self._judge()
        self._check_line()
        self._stream_ids = self._gate.door.stream_ids(self._inbound.request, let_in=self._let_in)
        renders = account.open()
        arrival = self._arrival(hints, renders=renders)
        placing = driver.admit(arrival)
        if not (placing.done() or arrival.brief):  # its tokens may decide
            account.render()
        forward = await placing
        if account.charge.limited:
            link, copies = driver.links[forward.engine], account.claim.copies
            await account.charge.count_inputs(link, account.record, copies=copies)
        self._body_out = account.goes(forward) if self._inbound.api.generates and self._let_in else self._body
        soon = STREAM_AT_WORK if self._hears_comments else AT_WORK
        asyncio.get_running_loop().call_later(soon, self._at_work, forward)
        return forward

    def _at_work(self, forward: Forward) -> None:
        """Do what would delay the request: the engine works on it now."""
        self._settle()
        if forward.reason is not Reason.BRIEF:  # a brief request is rendered after its answer
            self._account.render()

    async def _judge(self) -> None:
        """Have the engine that is back judge the key; if it cannot, the key stays accepted. Raises Fault."""
        if not self._gate.driver.engines.front(self._account.model).ready:
            return
        judged = await self._gate.door.judge(self._inbound.request, since=self._waits_since)
        if isinstance(judged, Refusal):
            self._let_in = False
            raise errors.retold(judged.status, judged.body)
        self._inbound.judged, self._caller = KeyCheck.LET_IN, self._gate.door.caller(self._inbound.request)

    def _check_line(self) -> None:
        """Check the limits of the queue. Raises CrowdedFault if too many requests wait."""
        placement, line, key = self._gate.driver.placement, self._caller.line, self._caller.key
        crowded = placement.no_room_for(line)
        if key and key.queued is not None and placement.waiting_of(line) >= key.queued:
            crowded = Crowded.KEY_QUEUED
        if crowded is not None:
            self._gate.metrics.crowded.labels(reason=crowded.value).inc()
            raise CrowdedFault(crowded, CROWDED[crowded], RETRY_AFTER)

    def _arrival(self, hints: RequestHints, *, renders: bool) -> Arrived:
        account, key = self._account, self._caller.key
        forms, divided = account.forms, self._gate.driver.placement.divided
        ask, other, proposed = forms.own, forms.rewritten, forms.proposed
        return Arrived(
            at=self._gate.driver.now(),
            request=account.key,
            client=self._caller.line,
            namespace=self._namespace,
            model=account.model,
            generates=self._inbound.api.generates,
            pinnable=ask is not None and self._inbound.api.pinnable,
            rendered=renders,
            id_slot=account.claim.id_slot,
            copies=account.claim.copies,
            hash_chain=ask.hash_chain if ask and ask.cache_prompt else (),
            rewritten=other.hash_chain if other else None,
            moved=proposed.moved if proposed else 0,
            most=proposed.most if proposed else 0,
            brief=self._inbound.api.pinnable and len(self._body) <= BRIEF_BYTES and not (other or divided),
            lora=account.claim.lora,
            uncached=ask is not None and not ask.cache_prompt,
            resumable=bool(self._stream_ids),
            bypass=self._bypasses,
            unplaced=self._obstacle(),
            kind=account.record.client,
            answer_limit=account.claim.most,
            size=len(self._body),
            outgrown=self._outgrown,
            hints=hints.limited(key.priority) if key else hints,
        )

    def _obstacle(self) -> Reason | None:
        """Return why it cannot be placed now although its client did not ask for a bypass."""
        if self._asks_bypass:
            return None
        obstacle = self._gate.driver.engines.obstacle(self._account.model)
        return obstacle or (None if self._let_in else Reason.KEY_UNCHECKED)

    async def _again(self, engine: EngineId, losses: int, fault: UpstreamFault) -> bool:
        """Whether to send the request again: another engine can take it, or this one is expected back.

        Raises UpstreamFault after DEATHS engines ended on it: this request may be the cause.
        """
        driver = self._gate.driver
        link = driver.links.get(engine)  # None: it was removed from the settings
        lost = link is None or await link.was_lost(losses)
        if self._waiting.begun or not (lost or driver.engines.has_other(engine, self._account.model)):
            return False
        self._deaths += not isinstance(fault, NotSent)
        if self._deaths >= DEATHS:
            raise UpstreamFault(
                f"the engine at {engine} has ended {DEATHS} times while it was at work on this request, "
                "which is not sent again; the engine's log may say why"
            ) from fault
        return driver.engines.may_serve(self._account.model)

    # -- the answer --------------------------------------------------------------------------------

    async def _answer(self, forward: Forward, losses: int) -> web.StreamResponse:
        """Send the request and relay the answer. `losses` is the engine's count from before the send."""
        driver = self._gate.driver
        link = driver.links[forward.engine]
        if link.routes:
            driver.engines.check_listed(link, self._account.claim.model)
        run = self._gate.aside if len(self._body_out) > HEAVY else here
        form = await run(self._formed, forward, link)
        self._account.progress = form.progress
        sent_at = driver.now()
        answer = await self._sent(forward, link, form.body)
        async with answer:
            if link.address.model and link.unloads(answer.status) and await link.was_lost(losses):
                raise UpstreamFault(f"the model {link.address.model} was unloaded before it began")
            self._waiting.stop()
            # The head goes out first: the scheduler may now decide about others.
            asyncio.get_running_loop().call_soon(self._started, self._account.key, form.progress is not None)
            cells = gate_for(driver, forward, outgrown=self._outgrown)
            relay = Relay(
                driver=driver,
                inbound=self._inbound,
                account=self._account,
                waiting=self._waiting,
                ahead=self._gate.ahead,
                cells=cells,
                forward=forward,
                link=link,
                form=form,
                sent_at=sent_at,
                answer=answer,
                streams=flows(answer),
                comments=self._hears_comments,
            )
            response = await relay.run()
        if is_failure(answer.status, self._account.listener.end()) and not (cells and cells.lacked):
            auth = self._gate.door.lent(self._inbound.request)
            failed = FailedRequest(self._inbound.api, self._body_out, auth, answer.status)
            driver.tasks.start(judge(driver, link, failed, self._gate.aside))
        return response

    def _started(self, request: RequestId, early: bool) -> None:
        driver = self._gate.driver
        driver.post(Started(at=driver.now(), request=request, before_prefill=early))

    async def _sent(self, forward: Forward, link: EngineLink, body: bytes) -> aiohttp.ClientResponse:
        """Send the request. Raises UpstreamFault, which counts as a failure of the engine."""
        try:
            async with answering(link):
                return await self._gate.upstream.send(
                    link.address,
                    self._inbound.request,
                    body,
                    self._account.id,
                    trace_parent=self._trace.trace_parent if self._trace else None,
                    held=self._bypasses or forward.reason not in WITHOUT_PLACE,
                    stream_ids=self._stream_ids,
                )
        except UpstreamFault:
            self._gate.driver.failed(link, broken=True)
            raise

    def _formed(self, forward: Forward, link: EngineLink) -> AnswerForm:
        """Return the body to send, with the fields that are ours, and the filters for its answer."""
        body = placed(self._without_cache(self._body_out, forward), self._account.claim, forward.slot)
        return form_for(self._account.forms.ask, body, forward, link)

    def _without_cache(self, body: bytes, forward: Forward) -> bytes:
        """Return the body to send; with caching off if the engine may reuse a state of others."""
        one_of_many = self._namespace or (self._gate.door.namespaces and not self._let_in)
        if not (one_of_many or forward.strict) or forward.isolated or not self._inbound.api.generates:
            return body
        if not self._inbound.api.pinnable:
            traits = self._gate.driver.links[forward.engine].traits
            if traits and not traits.slot_files:  # no slot can be erased there, so it would be refused again
                raise ClientFault(NEVER_APART, status=403)
            raise UpstreamFault(MIXED, status=503, retry_after=RETRY_AFTER)
        return uncached(body)

    def _labels(self) -> dict[str, str]:
        """Return our own headers, as far as they are known."""
        if self._forward is None:
            return {}
        labels = {names.DECISION: self._forward.reason.value}
        if handle := self._account.record.handle:
            labels[names.CONVERSATION] = handle
        pending = self._gate.driver.placement.pending(self._account.key)
        if self._forward.slot is not None and not self._namespace:
            labels[names.SLOT] = str(self._forward.slot)
        # without parked tokens, which would show how busy other namespaces are
        unseen = pending.parked if pending and self._namespace else 0
        labels[names.PLANTED] = str(pending.planted - unseen if pending else 0)
        if priority := self._account.record.urgency(namespaced=bool(self._namespace)):
            labels[names.PRIORITY] = priority
        if rules := self._account.rules:
            labels[names.REWRITTEN] = ", ".join(rules)
        if pending and pending.predicted is not None:
            labels[names.PREDICTED] = str(pending.predicted)
        return labels


# -- comments while a client waits -----------------------------------------------------------------------
# There may be nothing to send for minutes: the request is queued, steps are taken in its slot, or the
# engine computes the prompt, between its head and its first event. Clients, and proxies in front of us,
# close a silent connection. SSE comments (lines that begin with a colon) prevent that.

WAITING: Final = comment("waiting")
JSON: Final = "application/json; charset=utf-8"  # as llama-server writes it


@dataclass(slots=True, eq=False)
class Waiting:
    """A client that asked for a stream and waits for its first event.

    Once the head of a stream is sent, our own or the engine's, `opened` is the answer to continue. From then
    on headers and status cannot be passed on: an answer that is no stream must become an error event (`end`).
    Until `begun`, the request can still be sent again and another answer can follow.
    """

    request: web.Request
    request_id: str
    tasks: Tasks
    _: KW_ONLY
    seconds: float  # between two comments; 0: there are none
    labels: Callable[[], Mapping[str, str]]  # our own headers, as far as they are known
    opened: web.StreamResponse | None = None
    begun: bool = False  # the client has bytes of the engine's answer
    _sent: dict[str, str] = field(default_factory=dict)  # labels that the sent head has
    _talking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start comments, in the open answer or in our own answer, which begins with the first comment.

        If comments of a request that is sent again still run, they continue until `stop`.
        """
        if self._talking is not None or not self.seconds:
            return
        owner = asyncio.current_task()
        if owner is None:
            raise AssertionError("a handler runs in a task")
        self._talking = self.tasks.start(self._talk(owner))

    def stop(self) -> None:
        """End the comments: no byte of ours is written after this. No comment is cut off."""
        if self._talking is not None:
            self._talking.cancel()
            self._talking = None

    def ends_with(self, passing: bytes) -> bytes:
        """Return `passing`, the bytes for the client; the first bytes of an event end the waiting.

        The engine sends comments of its own during a long prefill. They are no part of its answer.
        """
        if not self.begun:
            lines, whole = passing.split(b"\n"), passing.endswith(b"\n\n")
            if not passing or (whole and all(line[:1] in {b"", b":"} for line in lines)):  # only comments
                return passing
            self.begun = True
        self.stop()
        return passing

    async def accept(self, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        """Send the engine's head with our labels. After our own head, write late labels as a comment."""
        labels = self.labels()
        if self.opened is None:
            response = prepared(answer, self.request_id)
            if answer.status < 400:  # else a client without a key would see what others have asked
                response.headers.update(labels)
            await response.prepare(self.request)
            if flows(answer):
                self.opened, self._sent = response, dict(labels)
            else:
                self.begun = True
            return response
        late = [f"{name}: {value}" for name, value in labels.items() if self._sent.get(name) != value]
        if late:
            await self.opened.write(comment(*late))
        return self.opened

    def whole(self, answer: aiohttp.ClientResponse, made: WholeAnswer) -> web.Response:
        """Return an answer that was made from the engine's stream, with the engine's head and our labels."""
        headers = prepared(answer, self.request_id).headers
        for name in ("Content-Type", "X-Accel-Buffering"):  # those of a stream
            headers.popall(name, None)
        if made.status < 400:
            headers.update(self.labels())
        headers["Content-Type"] = JSON
        return web.Response(status=made.status, headers=headers, body=made.body)

    async def end(self, event: bytes) -> web.StreamResponse:
        """End a stream that we opened, with one last event, because no stream came from the engine."""
        self.stop()
        if self.opened is None:
            raise AssertionError("only an opened stream can be ended")
        await self.opened.write(event)
        await self.opened.write_eof()
        return self.opened

    async def _talk(self, owner: asyncio.Task[object]) -> None:
        """Write comments for ever. If the client has left, cancel `owner`, the task of its request."""
        try:
            while True:
                await asyncio.sleep(self.seconds)
                response = self.opened or await self._open()
                await response.write(WAITING)
        except GONE:
            if not owner.cancelling():
                owner.cancel()

    async def _open(self) -> web.StreamResponse:
        """Send the head that the engine would send for a stream, with our own labels."""
        self._sent = dict(self.labels())
        origin = self.request.headers.get("Origin")
        self.opened = web.StreamResponse(
            headers={
                "Content-Type": EVENT_STREAM,
                "Server": "slotkeeper",
                "X-Accel-Buffering": "no",
                **({"Access-Control-Allow-Origin": origin} if origin else {}),
                names.REQUEST_ID: self.request_id,
                **self._sent,
            }
        )
        await self.opened.prepare(self.request)
        return self.opened


# -- the form of an answer: as the client wants it, or a stream from which a whole one is assembled ------

# Requests that are not changed, or are so short that progress does not help.
NO_PROGRESS: Final = frozenset({Reason.BYPASS, Reason.BRIEF})


class NotAssembled(UpstreamFault):
    """A stream ended, but no whole answer could be assembled. The client has received no byte of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """The body to send to the engine, and the filters for its answer."""

    body: bytes
    progress: ProgressFilter | None = None
    assembler: Assembler | None = None  # the client wants a whole answer, and the engine sends a stream


def form_for(ask: Ask | None, body: bytes, forward: Forward, link: EngineLink) -> AnswerForm:
    """Choose the form. Only a router's model is asked for a stream that the client did not request."""
    if ask is None:
        return AnswerForm(body=body)
    routed = bool(link.address.model) and not link.address.swaps and link.assembles
    if routed and forward.reason is not Reason.BYPASS and can_assemble(ask):
        watched = ask.api in PROGRESS_ROUTES
        return AnswerForm(
            body=as_stream(body, ask.api, progress=watched),
            progress=ProgressFilter() if watched else None,
            assembler=Assembler(ask.api),
        )
    # Other servers may refuse the field.
    if can_ask(ask) and forward.reason not in NO_PROGRESS and not link.health.unlike_ours:
        return AnswerForm(body=ask_for(body), progress=ProgressFilter())
    return AnswerForm(body=body)


# -- no free cell: the engine's KV buffer was too small for the request (engine.md 14) ------------------
#
# That is a whole answer of 500, or the last event of a stream whose head was sent long before. As long as the
# client has only heads and comments, the request can be sent again.

NO_CELLS: Final = b"Context size has been exceeded"
ERRORS: Final = (b'data: {"error"', b"event: error", b"error: ")  # beginnings of an error event
END: Final = b"\n\n"
LONGEST: Final = 4096  # bytes, the longest such answer or event


class OutOfCells(UpstreamFault):
    """The engine had no free cell, and the client has no byte of an answer yet."""


@dataclass(slots=True, eq=False)
class CellsGate:
    """Holds back the beginning of an answer while it may be this error, and reports it to the driver."""

    driver: Driver
    request: RequestId
    _: KW_ONLY
    shut: bool  # the beginning of the answer is held back; else everything passes
    last: bytes = b""  # the last bytes that the engine has sent
    lacked: bool = False  # the answer was this error
    _held: bytes = b""

    def ended(self, answer: Answer) -> None:
        """Report the error if it is the last event of an answer that was passed on."""
        if answer.error is not None and NO_CELLS in self.last:
            self._report(again=False)

    def _out_of_cells(self) -> OutOfCells:
        self._report(again=True)
        return OutOfCells("the engine had no room for this request in its KV buffer", status=500)

    def _report(self, *, again: bool) -> None:
        self.lacked = True
        self.driver.post(Exceeded(at=self.driver.now(), request=self.request, again=again))

    async def whole(self, answer: aiohttp.ClientResponse) -> bytes:
        """Read a short answer of 500 that is no stream, and check it; read nothing of any other answer.

        Returns the bytes read. Raises OutOfCells, UpstreamFault.
        """
        size = answer.content_length
        if not self.shut or answer.status != 500 or flows(answer) or size is None or size > LONGEST:
            return b""
        body = await whole(answer, lambda _: None)
        if NO_CELLS in body and b'"error"' in body:
            raise self._out_of_cells()
        return body

    def passing(self, chunk: bytes) -> bytes:
        """Return the bytes of a stream that may be passed on. Raises OutOfCells."""
        if not self.shut or not chunk:
            return chunk
        self._held += chunk
        out = []
        while self._held.startswith(b":"):  # comments may come before any event
            line, end, rest = self._held.partition(END)
            if not end:
                break
            out.append(line + end)
            self._held = rest
        if self._may_be_error():
            if NO_CELLS in self._held:
                raise self._out_of_cells()
        else:
            out.append(self.close())
        return b"".join(out)

    def _may_be_error(self) -> bool:
        """Whether the first event is this error, or is incomplete and may become an error."""
        held = self._held
        if len(held) > LONGEST:
            return False
        if not held.startswith(b":") and not any(
            held.startswith(begin) or begin.startswith(held) for begin in ERRORS
        ):
            return False
        return END not in held or NO_CELLS in held.partition(END)[0]

    def close(self) -> bytes:
        """Return the bytes held back; all that follows passes."""
        held, self._held, self.shut = self._held, b"", False
        return held


def gate_for(driver: Driver, forward: Forward, *, outgrown: bool) -> CellsGate | None:
    """Return the gate for an answer; None where slots share no KV buffer: no answer can be this error.

    `outgrown`: the request was sent again once for this error, so the gate holds nothing back.
    """
    if not driver.placement.may_lack_cells(forward.engine):
        return None
    return CellsGate(driver, forward.request, shut=not outgrown and forward.reason is not Reason.BYPASS)


# -- relaying the answer ---------------------------------------------------------------------------------

# An answer's head waits for our own prediction, which is only a header, for so many seconds at most, and for
# so much of the time that the engine took: a short turn on a fast engine is answered before we have rendered.
PREDICTION_SECONDS: Final = 0.05
PREDICTION_SHARE: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Relay:
    """Relays one answer: whole, as an error event, or visibly broken off (the connection ends within it).

    Raises UpstreamFault if it breaks off before the client has a byte of it.
    """

    driver: Driver
    inbound: Inbound
    account: Account
    waiting: Waiting
    ahead: Budget  # for bytes that the engine has sent and the client has not read yet
    cells: CellsGate | None  # detects a lack of free KV cells; None where that cannot be
    forward: Forward
    link: EngineLink
    form: AnswerForm
    sent_at: float  # seconds on the driver's clock
    answer: aiohttp.ClientResponse
    streams: bool  # events may be added to the answer, and removed
    comments: bool  # we may write comments between the engine's events

    async def run(self) -> web.StreamResponse:
        """Copy the answer, after our own head if that is sent. The first event ends the waiting."""
        account, waiting, answer = self.account, self.waiting, self.answer
        account.listener.begin(answer)
        body = await self.cells.whole(answer) if self.cells else b""
        await self._predicted()
        if waiting.opened is not None and not self.streams:
            return await self._retell(body)
        if self.form.assembler and self.streams:
            return await self._assembled(self.form.assembler)
        response = await waiting.accept(answer)
        if self.streams and self.comments:
            waiting.start()
        crowded = self.driver.placement.has_waiting
        with Outlet(self.ahead, self.inbound.request, response, crowded=crowded) as out:
            try:
                await self._copied(out.write, waiting.ends_with, read=body)
            except UpstreamFault as fault:
                waiting.stop()
                self.link.kick()
                # Without a byte of an answer the client sees nothing of this, if it is sent again.
                if not waiting.begun or isinstance(fault, OutOfCells):
                    raise
                account.gone()
                await self._break_off(out, fault)
                return response
            if self.cells:
                self.cells.ended(account.listener.end())
            await self._end(out)
        return response

    async def _end(self, out: Outlet) -> None:
        """Write the end of the answer and report it.

        The end comes first, since the client's next turn waits for it and not for our bookkeeping. But a
        client that still reads does not hold the slot.
        """
        finish = partial(self.account.finished, self.forward, self.link, self.answer.status)
        if reads := out.left > 0:
            finish()
        try:
            await out.end()
        finally:
            if not reads:
                finish()

    async def _copied(
        self,
        write: Callable[[bytes], Awaitable[None]],
        written: Callable[[bytes], bytes],
        *,
        read: bytes = b"",
    ) -> None:
        """Copy the answer without its progress events. Raises UpstreamFault.

        Before `write` gets bytes, `written` gets them and returns those to write. `read`: bytes read before.
        """
        listener, cells = self.account.listener, self.cells
        progress = self.form.progress if self.streams else None
        steps: list[Callable[[bytes], bytes]] = []
        if progress:
            steps.append(partial(listener.without, progress))
        if cells and self.streams:
            steps.append(cells.passing)
        steps.append(written)

        def seen(chunk: bytes) -> None:
            self.link.pulse.answered()
            if cells:
                cells.last = chunk
            listener.read(chunk)

        async with answering(self.link):
            await copy(self.answer, write, seen, steps, read=read)
        self.waiting.stop()
        self._check_whole()  # first: a request without a byte of its answer can be sent again
        if self.streams:
            await write((cells.close() if cells else b"") + (progress.close() if progress else b""))

    async def _assembled(self, assembler: Assembler) -> web.Response:
        """Return the whole answer that a stream contains. Until it is complete, the client has no byte of it.

        Raises UpstreamFault, NotAssembled.
        """

        async def take(chunk: bytes) -> None:
            assembler.feed(chunk)

        try:
            await self._copied(take, bytes)
        except UpstreamFault:
            self.link.kick()
            raise
        made = assembler.close()
        if made is None:
            self.link.assembles = False
            log.warning("answer_not_assembled", request_id=self.account.id, engine=self.link.engine)
            self.driver.metrics.fallback("assemble")
            raise NotAssembled("no whole answer could be made of the engine's stream")
        if self.cells:
            self.cells.ended(self.account.listener.end())
        self.account.finished(self.forward, self.link, made.status)
        return self.waiting.whole(self.answer, made)

    def _check_whole(self) -> None:
        """Check that an answer which ended normally has its end. Raises UpstreamFault.

        A router ends a stream normally if its engine dies (engine.md 13), an engine if another request takes
        its X-Conversation-Id, and a gateway in front of either for reasons of its own. Other servers than
        llama-server may write other last events, so their answers are not checked.
        """
        if not self.inbound.api.generates or self.link.health.unlike_ours:
            return
        if self.account.listener.broke_off(self.answer):
            of = "the router" if self.link.address.model else "the engine"
            raise UpstreamFault(f"{of} broke off in the middle of an answer: its last event is missing")

    async def _predicted(self) -> None:
        """Wait briefly for our prediction, if its rendering has begun."""
        pending = self.driver.placement.pending(self.account.key)
        if pending and pending.predicted is None and self.account.renders and not pending.rendered:
            took = self.driver.now() - self.sent_at
            with suppress(TimeoutError):
                async with asyncio.timeout(min(PREDICTION_SECONDS, PREDICTION_SHARE * took)):
                    await self.account.rendered.wait()

    async def _retell(self, read: bytes) -> web.StreamResponse:
        """Send the engine's answer as an error event: it is no stream, but the client already reads one."""
        account, answer = self.account, self.answer
        try:
            async with answering(self.link):
                account.listener.read(read)  # `CellsGate` has read a short answer of 500 already
                body = read + await whole(answer, account.listener.read)
        except UpstreamFault:
            self.link.kick()
            raise
        account.finished(self.forward, self.link, answer.status)
        fault = errors.retold(answer.status, body)
        if answer.status < 400:
            account.outcome = "upstream_error"
            fault = UpstreamFault(f"the engine answered {answer.content_type} where a stream was asked for")
        return await self.waiting.end(errors.sse(fault, self.inbound.api))

    async def _break_off(self, out: Outlet, fault: UpstreamFault) -> None:
        """Cut an incomplete answer: its connection ends within it, in a stream after an error event."""
        log.warning("answer_broke_off", request_id=self.account.id, error=fault.message)
        if self.streams:
            await out.write(b"\n\n" + errors.sse(fault, self.inbound.api))
            await out.cut()
        else:
            abort(self.inbound.request)


# -- failed answers: the engine's own fault, which its circuit breaker counts, or the request's ----------
#
# llama-server answers 500 also if the request is at fault: for messages and tools of no known shape, and if
# the template raises. Its route /apply-template answers these bodies with 500 too, although it computes
# nothing.

SERVER_ERROR: Final = 500  # and above: a failure of the engine, not of the client
NO_SUCH: Final = 501  # except this: the engine does not have the feature
OF_STREAMS: Final = "server_error"  # the type of an error that the engine writes into a stream


def is_failure(status: int, answer: Answer) -> bool:
    """Whether an answer failed by its status, or its stream ended with an error of the engine.

    The head of a stream is sent when its task begins, so an error of the computation comes behind a 200.
    """
    if status < 400:
        return answer.error == OF_STREAMS
    return status >= SERVER_ERROR and status != NO_SUCH


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A request as it was sent to an engine, which failed."""

    api: Api
    body: bytes
    auth: Mapping[str, str]
    status: int  # of the answer


async def judge(driver: Driver, link: EngineLink, failed: FailedRequest, aside: Runner) -> None:
    """Record that the engine failed a request, unless the request is at fault.

    A heavy request may be at fault: to find out would stop the event loop, and a lighter one will show it.
    """
    if failed.status == SERVER_ERROR and len(failed.body) > HEAVY:
        return
    run = aside if is_large(failed.body) else here
    chat = await run(chat_of, failed.api, failed.body) if failed.status == SERVER_ERROR else None
    if chat is None or not await _refused(link, chat, failed.auth):
        driver.failed(link, broken=False)


async def _refused(link: EngineLink, chat: Doc, auth: Mapping[str, str]) -> bool:
    """Whether the engine does not even make the prompt of a chat."""
    try:
        await link.client.apply_template(chat, headers=auth or link.auth)
    except EngineError as error:
        return error.status == SERVER_ERROR
    except EngineGoneError:
        return False
    return False
