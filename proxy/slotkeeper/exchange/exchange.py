"""One request that takes a slot, from its body on: comments while it waits, relay, end, account."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from secrets import token_hex
from typing import TYPE_CHECKING, Final, Self

import orjson
from aiohttp import web

from slotkeeper.api import errors
from slotkeeper.api import head as names
from slotkeeper.api.answers.answer import (
    Answer,
    AnswerReader,
    ProgressFilter,
    TokenTimes,
    comment,
    waiting_event,
)
from slotkeeper.api.answers.answer_builder import Figures
from slotkeeper.api.answers.assembling import Assembler, WholeAnswer, as_stream
from slotkeeper.api.document import Doc, NotOurs, Prompt
from slotkeeper.api.errors import ClientFault, Fault, UpstreamFault, outcome_by, too_long
from slotkeeper.api.head import Api, Secrets, request_id, takes_form
from slotkeeper.api.head import request_id as safe_id
from slotkeeper.api.request import (
    HEAVY,
    LARGE,
    NOTHING_ASKED,
    PROGRESS_ROUTES,
    UNNAMED,
    Ask,
    Asked,
    Claim,
    NotPlain,
    PromptSize,
    ask_for,
    can_ask,
    can_assemble,
    chat_of,
    check_lists,
    inputs_of,
    is_large,
    model_of,
    placed,
    read,
    size_of,
    uncached,
    understood,
)
from slotkeeper.conversation.likeness import asks_aside
from slotkeeper.conversation.naming import Naming
from slotkeeper.conversation.rules.apply import Outcome
from slotkeeper.engine.answers import EngineError, EngineGoneError
from slotkeeper.exchange.bodies import SENT, Body, Budget, Outlet
from slotkeeper.exchange.credentials import ANYONE, Door, KeyCheck, Refusal
from slotkeeper.exchange.forwarding import (
    EVENT_STREAM,
    GONE,
    EngineAnswer,
    NotSent,
    Upstream,
    abort,
    answering,
    copy,
    flows,
    prepared,
    whole,
)
from slotkeeper.exchange.keys import CROWDED, Counted, CrowdedFault
from slotkeeper.exchange.slot_actions import SlotActions
from slotkeeper.exchange.streams import is_stream_route
from slotkeeper.observe.log import get_logger, sayable
from slotkeeper.observe.metrics import Metrics
from slotkeeper.observe.recording import Recorder
from slotkeeper.observe.request_record import (
    BRIEFEST_WAIT,
    Record,
    RequestStage,
    moment_of,
    places_in,
    planting,
)
from slotkeeper.observe.states import request_text
from slotkeeper.runtime.driver import LATEST, Driver
from slotkeeper.runtime.heavy import Weighed, Weigher
from slotkeeper.runtime.link import EngineLink
from slotkeeper.runtime.render import (
    LONG_CHAT_BYTES,
    RENDER_FAILURES,
    TurnRenderer,
    boundaries_of,
    prompt_of,
    with_reply,
)
from slotkeeper.runtime.rewriting import Rewriting, Taken
from slotkeeper.runtime.tasks import Aside, Runner, Tasks, here
from slotkeeper.scheduler.effects import Forward
from slotkeeper.scheduler.events import (
    Arrived,
    Exceeded,
    Finished,
    Gone,
    NextKnown,
    Rendered,
    ReplyKnown,
    Started,
)
from slotkeeper.scheduler.prompts.tokens import Boundary, Tokens
from slotkeeper.scheduler.requests.figures import Unknown, usage_of
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
from slotkeeper.vocab.tokenizer import TokenizeError

if TYPE_CHECKING:
    from slotkeeper.observe.spans import Spans

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
# Generated tokens up to which the reply to a brief request is not learned: two renderings cost more than the
# reuse of so few tokens saves.
BRIEF_REPLY_TOKENS: Final = 256

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
        self._waiting = Waiting(
            inbound.request,
            inbound.id,
            gate.driver.tasks,
            seconds=gate.keep_alive,
            labels=self._labels,
            says=self._says,
        )
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
                asks = self._inbound.request.headers.get(names.PROGRESS) == "1"
                if asks or (ask is not None and ask.progress):
                    self._waiting.seconds = PROGRESS_SECONDS
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

    async def _sent(self, forward: Forward, link: EngineLink, body: bytes) -> EngineAnswer:
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

    def _says(self) -> bytes:
        """Return what a waiting client hears: a comment, or an event if it asked for progress."""
        driver, record = self._gate.driver, self._account.record
        now = moment_of(driver.placement, record, places_in(driver.placement), driver.now())
        if now is None:
            return comment("waiting")
        now = replace(now, behind=())  # requests of other clients
        ask, event = self._account.forms.ask, None
        if ask is not None and ask.progress:
            progress = planting(record, now, driver.now())
            event = waiting_event(ask.api, self._account.id, int(time.time()), now.shown(), progress)
        return event or comment(f"waiting: {request_text(now)}")

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

PROGRESS_SECONDS: Final = 1.0  # between two comments or events for a client that asked for progress
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
    says: Callable[[], bytes]  # a comment, or an event, with what the request waits for
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

    async def accept(self, answer: EngineAnswer) -> web.StreamResponse:
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

    def whole(self, answer: EngineAnswer, made: WholeAnswer) -> web.Response:
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
                await response.write(self.says())
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

    async def whole(self, answer: EngineAnswer) -> bytes:
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
    answer: EngineAnswer
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
                await self._copied(out.put, out.write, waiting.ends_with, read=body)
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
        put: Callable[[bytes], bool],
        write: Callable[[bytes], Awaitable[None]],
        written: Callable[[bytes], bytes],
        *,
        read: bytes = b"",
    ) -> None:
        """Copy the answer without its progress events, by `put` and `write` as `copy` does.

        `written` gets the bytes first, and returns those to write. `read`: bytes read before. Raises
        UpstreamFault.
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
            await copy(self.answer, put, write, seen, steps, read=read)
        self.waiting.stop()
        self._check_whole()  # first: a request without a byte of its answer can be sent again
        if self.streams:
            await write((cells.close() if cells else b"") + (progress.close() if progress else b""))

    async def _assembled(self, assembler: Assembler) -> web.Response:
        """Return the whole answer that a stream contains. Until it is complete, the client has no byte of it.

        Raises UpstreamFault, NotAssembled.
        """

        def put(chunk: bytes) -> bool:
            assembler.feed(chunk)
            return True

        async def write(chunk: bytes) -> None:
            put(chunk)

        try:
            await self._copied(put, write, bytes)
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


# -- the account of a request: what driver, metrics and journal learn of it -----------------------------

# Nothing from here on may harm a request: a failure is counted, and its result is left out.


# On other routes a different count may come from our conversion of the body.
OUR_TOKENIZER: Final = frozenset({Api.CHAT, Api.COMPLETION, Api.COMPLETIONS})

Found = tuple[Tokens | None, tuple[Boundary, ...], TurnRenderer | None]
NOT_FOUND: Final[Found] = (None, (), None)
NO_SECRETS: Final = Secrets(frozenset())


class Account:
    """The report on one request. It posts exactly one of Finished and Gone for every key that `open` made."""

    listener: Listener  # this and the next are made anew by `open`
    rendered: asyncio.Event

    def __init__(
        self,
        driver: Driver,
        api: Api,
        request_id: str,
        auth: dict[str, str],
        headers: Mapping[str, str],
        *,
        client: str,
        conversation: str | None,
        names: Naming | None = None,
        secrets: Secrets = NO_SECRETS,
    ) -> None:
        """`client`: digest of client and program; `secrets`: the request's credentials, never recorded.

        `headers`: those of the request without values that contain a credential under another name.
        """
        self._driver = driver
        self._metrics = driver.metrics
        self._api = api
        self._auth = auth
        self._headers = headers
        self._secrets = secrets
        self._open = False  # the driver waits for its end
        self._rendering: asyncio.Task[None] | None = None
        self._answered: tuple[Answer, EngineLink] | None = None  # a complete answer with a reply
        self._unrendered: Ask | None = None  # the driver expects its tokens, but rendering has not begun
        self.id = request_id
        self.key = RequestId("")
        self.claim: Claim = UNNAMED
        self.asked = NOTHING_ASKED  # by our own headers
        self.parsed = False  # the body is a JSON object, which we have read
        self.forms = Forms()
        self.charge = Charge(api)
        self.arrived = driver.now()
        self.outcome = "broken"
        self.key_name: str | None = None  # the name of the client's key in --keys-file
        self.model = NO_ROUTER  # the model of a router that must serve it
        self.progress: ProgressFilter | None = None  # the prefill's progress, if we asked for it
        self.record = Record(
            request_id=request_id,
            route=api.value,
            received=time.time(),
            at=self.arrived,
            client=client,
            named=conversation,
        )
        names = Naming() if names is None else names
        self.notes = ConversationNotes(self.record, self._metrics, names, headers, secrets, conversation)
        driver.note(driver.journal.arrived, self.record)

    # -- the body ----------------------------------------------------------------------------------

    async def understand(self, body: bytes, encoding: str = "", *, run: Runner = here) -> Doc:
        """Parse the body, and read what the request claims of the engine; `run` runs that.

        Raises NotPlain for a body that must not be forwarded, and ClientFault for values that are too large.
        """
        self.record.body_bytes, self.forms.received = len(body), body
        doc, self.claim = await run(understood, self._api, body, encoding)
        if self.charge.limited:
            self.charge.inputs = await run(inputs_of, self._api, doc)
        self.parsed = True
        return doc

    async def weigh(self, body: bytes, encoding: str, weigher: Weigher, model: ModelName) -> Weighed:
        """Have another process read a heavy body, and take its claim. Raises what `understand` raises.

        It also raises ClientFault for a prompt that fits no engine's context. So does `parse`.
        """
        self.record.body_bytes, self.forms.received = len(body), body
        weighed = await weigher(self._api, body, encoding)
        self.claim, self.parsed = weighed.claim, True
        self.record.model = None if self._secrets.stand_in(weighed.model or "") else weighed.model
        await self._check_length(weighed.size, model)
        return weighed

    async def _check_length(self, size: PromptSize, model: ModelName) -> None:
        """Raise ClientFault for a prompt that fits no engine's context, before anything is done for it."""
        engines = self._driver.engines
        model = model or engines.model_of(self.claim.model)
        found = await engines.least_too_long(size, model, self._auth)
        if found is not None:
            raise too_long(self._api, *found)

    async def parse(
        self,
        body: bytes,
        rewriting: Rewriting | None = None,
        *,
        encoding: str = "",
        run: Runner = here,
        model: ModelName = NO_ROUTER,
    ) -> None:
        """Call `understand`, and apply the rules. Raises what `understand` raises, and `too_long`.

        A request whose prompt we cannot make is forwarded: the engine's error explains it better.
        """
        self.notes.name()
        doc, taken = await self.understand(body, encoding, run=run), None
        if is_large(body):
            await self._check_length(await run(size_of, self._api, doc), model)
        try:
            check_lists(doc)
            named = model_of(doc)
            self.record.model = None if named and self._secrets.stand_in(named) else named
            if rewriting:
                if rewriting.text:
                    self.record.keyed = await run(self._secrets.masked, body) != body
                context = self._driver.context(self.claim.model)
                taken = await self.notes.take(rewriting, self._api, doc, context=context, run=run)
            self.forms.own = await run(read, self._api, doc, self.claim)
            if taken and taken.rewritten is not None:
                self.forms.proposed = taken.outcome
                self.forms.rewritten = await run(read, self._api, taken.rewritten, self.claim)
        except NotOurs as why:
            log.info("unreadable_request", request_id=self.id, route=self._api.value, why=why.reason)
        except Fault:
            raise
        except Exception:
            log.exception("parse_failed", request_id=self.id)
            self._metrics.fallback("parse")
        self._metrics.spent("parse", self._driver.now() - self.arrived)

    def waits(self) -> None:
        """Note that no engine is up: from now on the request waits for one, until it is in the queue."""
        if self.record.doing is RequestStage.PARSE:
            self.record.passes(self._driver.now(), RequestStage.ENGINE)

    def hints(self, since: float) -> RequestHints:
        """Return how urgent the request is. `since`: when its wait began, in seconds."""
        taken = self.notes.taken
        aside = taken is not None and asks_aside(taken.received)
        return self.asked.hints(self.claim.hints, aside=aside, since=since)

    # -- the form that is sent ---------------------------------------------------------------------

    def goes(self, forward: Forward) -> bytes:
        """Return the body to send, and note its form. `notes.settle` reports on it while the engine works."""
        forms = self.forms
        forms.changed = forward.changed and forms.rewritten is not None
        if pending := self._driver.placement.pending(self.key):
            self.record.weighed = pending.weighed
        self.notes.goes(changed=forms.changed)
        return orjson.dumps(forms.proposed.doc) if forms.proposed and forms.changed else forms.received

    # -- the tokens --------------------------------------------------------------------------------

    def open(self) -> bool:
        """Make a new key, by which the driver knows this attempt. Returns whether `Rendered` must follow."""
        self.key = RequestId(f"{next(self._driver.numbers)}:{self.id}")
        self._open = True
        self._rendering = self.progress = None
        self.listener = Listener(self._api, self.record, self._metrics, self._driver.now)
        if self._auth:
            self._driver.effect_runner.lent[self.key] = self._auth
        self._driver.note(self._driver.journal.follow, self.key, self.record)
        self.rendered = asyncio.Event()
        ask, self.forms.changed = self.forms.own, False
        self._unrendered = ask if ask and (ask.chat is not None or ask.prompt is not None) else None
        return self._unrendered is not None

    @property
    def renders(self) -> bool:
        """Whether rendering has begun."""
        return self._rendering is not None

    def render(self) -> None:
        """Start rendering in the background, once for each key."""
        if self._unrendered is not None:
            self._rendering = self._driver.tasks.start(self._render(self._unrendered))
            self._unrendered = None

    async def _render_late(self, ask: Ask) -> None:
        """Render the request and its reply: the engine to which they went is known now."""
        learning = self._driver.learning
        learning.add(self.key)
        try:
            await self._render(ask)
            if self._answered is not None:
                await self._learn_reply(*self._answered)
        finally:
            learning.discard(self.key)

    async def _look_back(self) -> None:
        """Render a brief request, and learn its reply, if that is long, once nobody is served.

        While others are served, they would wait for the rendering too, so it is put off as well. If the slot
        has another task by then, nobody can reuse these few tokens, and they stay unknown.
        """
        driver = self._driver
        try:
            if not driver.placement.serving:
                self.render()
            if not await driver.idle_moment(self.key, within=LATEST) and not driver.placement.holds(self.key):
                self._stays_unknown()
                return
            self.render()
            if self._answered and (self._answered[0].figures.generated or 0) > BRIEF_REPLY_TOKENS:
                await self._learn_reply(*self._answered)
            elif self._answered and self._answered[0].reply and self.forms.ask:
                with suppress(NotOurs):
                    driver.next_turns.heard(self.record.client, self.forms.ask, self._answered[0].reply)
            if self.renders:
                await self.rendered.wait()
        finally:
            driver.learning.discard(self.key)

    def _stays_unknown(self) -> None:
        """Report that the tokens of a brief request are not looked for, unless they are already."""
        if self._unrendered is not None:
            self._unrendered, now = None, self._driver.now()
            self._driver.post(Rendered(at=now, request=self.key, prompt=None, unknown=Unknown.BRIEF))

    async def _render(self, ask: Ask) -> None:
        driver, started, key, rendered = self._driver, self._driver.now(), self.key, self.rendered
        self.record.renders = started
        found: list[Found] = [NOT_FOUND, NOT_FOUND]
        if ask.images:
            driver.engines.pictures.keep(ask.images)
        asks, unknown = [ask, *filter(None, (self.forms.rewritten,))], Unknown.NO_TOKENS
        try:
            while (link := await driver.engines.serving(self.model, lambda: self._open)).ready:
                try:
                    found[: len(asks)] = await asyncio.gather(*(self._found(link, each) for each in asks))
                    await driver.look_elsewhere(key, found[0][0])
                    break
                except EngineGoneError:
                    if not await driver.engines.comes_back(link):
                        raise
            else:
                unknown = link.unknown
                if unknown is not Unknown.NO_SLOTS:  # what its slots hold will never be known
                    late = partial(self._render_late, ask)
                    driver.effect_runner.late_renders.keep(key, self.record.body_bytes, late)
        except RENDER_FAILURES as error:
            log.info("not_rendered", request_id=self.id, error=sayable(error))
            if isinstance(error, TokenizeError):  # else the model cannot take it, or the engine is gone
                self._metrics.fallback("render")
        finally:
            (own, boundaries, render), (rewritten, others, other_render) = found
            self.forms.prompts, self.forms.renderers = (own, rewritten), (render, other_render)
            rendered.set()
            at = driver.now()
            prompt = self.forms.prompt
            tokens = None if prompt is None else len(prompt)
            self.record.add(RequestStage.RENDER, started, at, tokens=tokens)
            self.record.renders = None
            driver.post(
                Rendered(
                    at=at,
                    request=key,
                    prompt=own,
                    boundaries=boundaries,
                    rewritten=rewritten,
                    rewritten_boundaries=others,
                    unknown=unknown,
                )
            )
        self._metrics.spent("render", driver.now() - started)

    async def _found(self, link: EngineLink, ask: Ask) -> Found:
        """Return the prompt's tokens, its boundaries, and what renders longer chats of its.

        Raises what `prompt_of` raises.
        """
        size, latest = self.record.body_bytes, self._driver.latest_prompts
        large, render = size > LARGE, latest.renderer(link, ask) if size > LONG_CHAT_BYTES else None
        async with self._driver.large_renders if large else nullcontext():
            prompt = await prompt_of(link, ask, self._auth, render)
            if prompt is None:
                return NOT_FOUND
            if render:
                latest.keep(ask, render)
            return prompt, await boundaries_of(link, ask, prompt, self._auth), render

    @property
    def rules(self) -> list[str]:
        """The names of the rules that changed the body that is sent."""
        return self.notes.taken.rules if self.notes.taken and self.forms.changed else []

    # -- the end -----------------------------------------------------------------------------------

    def finished(self, forward: Forward, link: EngineLink, status: int) -> None:
        """Report that the answer has ended normally."""
        self.notes.settle()
        answer, planted = self.listener.end(), 0
        figures, driver = answer.figures, self._driver
        if pending := driver.placement.pending(self.key):
            planted, self.record.weighed = pending.planted, pending.weighed
        self.charge.ended(figures if status < 400 else None, planted, copies=self.claim.copies)
        self.outcome = outcome_by(status)
        self._open = False
        driver.effect_runner.lent.pop(self.key, None)
        self._note(figures, planted, status)
        driver.post(
            Finished(
                at=driver.now(),
                request=self.key,
                prompt_tokens=figures.prompt_tokens,
                cached=figures.cached,
                generated=figures.generated,
                slot=figures.slot,
                prefill_seconds=figures.prefill_ms / 1000 if figures.prefill_ms else None,
                failed=answer.error is not None,
                calls_tools=answer.calls_tools,
            )
        )
        brief = forward.reason is Reason.BRIEF
        if not brief:
            self.render()
        self._metrics.waited(self.record.first_token, self.record.stall, self.id)
        self._log(answer, forward, status)
        if status < 400 and answer.complete and answer.reply:
            self.notes.replied(answer.reply)
        if self.renders and not self.rendered.is_set():
            driver.tasks.start(self._compare_later(figures, link, status, planted))
        else:
            self._compare(figures, link, status, planted)
        known = self.forms.ask is not None and figures.generated and answer.complete and status < 400
        if known and answer.reply is not None:
            self._answered = answer, link
        if brief:
            driver.learning.add(self.key)
            driver.tasks.start(self._look_back())
        elif self._answered is not None:
            driver.learning.add(self.key)
            driver.tasks.start(self._learn_reply(answer, link))

    def gone(self) -> None:
        """Report that the client left or the answer broke off, unless the end is reported already."""
        if self._open:
            self._open, self._unrendered, driver = False, None, self._driver
            reached, cached = self._reached()
            pending = driver.placement.pending(self.key)
            planted = driver.effect_runner.computed(self.key) + (pending.planted if pending else 0)
            predicted = pending.predicted if pending else None
            held = (predicted or 0) if reached is None else cached
            self.charge.left_at((reached or 0) - cached, self.listener.events, planted, held=held)
            driver.effect_runner.lent.pop(self.key, None)
            driver.post(Gone(at=driver.now(), request=self.key, reached=reached, cached=cached))
            if self._rendering is not None:  # its tokens are not needed any more
                self._rendering.cancel()

    def _reached(self) -> tuple[int | None, int]:
        """Return the tokens reached by the prefill and those cached, by the engine's last report."""
        if self.progress and self.progress.latest is not None:
            return self.progress.latest.processed, self.progress.latest.reused
        figures = self.listener.end().figures  # of an answer that broke off after them
        if figures.prompt_tokens is None or figures.cached is None:
            return None, 0
        return figures.prompt_tokens, figures.cached

    def close(self) -> None:
        self.gone()
        self.notes.settle()
        record, now = self.record, self._driver.now()
        if record.doing is not RequestStage.ENGINE or now - record.since >= BRIEFEST_WAIT:
            record.passes(now, None)
        record.outcome, record.doing, record.seconds = self.outcome, None, now - self.arrived
        self._metrics.ended(record.spent(now), self.id)
        self._metrics.requests.labels(route=self._api.value, outcome=self.outcome).inc()

    def _note(self, figures: Figures, planted: int, status: int) -> None:
        """Write the engine's figures to the record."""
        record = self.record
        record.status, record.generated = status, figures.generated
        record.prompt_tokens = figures.prompt_tokens
        record.usage = usage_of(figures.prompt_tokens, figures.cached, planted=planted)

    def _compare(self, figures: Figures, link: EngineLink, status: int, planted: int) -> None:
        """Compare the engine's figures with the prompt, as far as its tokens are known."""
        self._check_count(figures.prompt_tokens, link)
        if status < 400:
            self.notes.answered(figures, self.forms.prompt, planted=planted)
        if repeated := self.record.repeated:
            self._metrics.history.add(repeated=repeated)

    async def _compare_later(self, figures: Figures, link: EngineLink, status: int, planted: int) -> None:
        """Compare once the prompt is rendered: the answer ended before that."""
        await self.rendered.wait()
        self._compare(figures, link, status, planted)

    def _check_count(self, counted: int | None, link: EngineLink) -> None:
        """Stop trusting the tokenizer if the engine counts other tokens: it is not exact for this model."""
        prompt = self.forms.prompt
        if prompt is None or counted is None or counted == len(prompt):
            return
        if self.forms.renderer(link).pieced:
            link.renders_parts = dict.fromkeys(link.renders_parts, False)
        elif prompt.chunks:
            link.images.distrust(prompt)
        elif self._api in OUR_TOKENIZER and link.tokenizer is not None:
            link.tokenizer.distrust(f"counted {len(prompt)} tokens where the engine counted {counted}")
        else:
            return
        log.warning("count_differs", request_id=self.id, engine=counted, ours=len(prompt))

    async def _learn_reply(self, answer: Answer, link: EngineLink) -> None:
        """Render the reply and the next turn's prefix for the driver; if that fails, nothing is known."""
        driver = self._driver
        try:
            await self.rendered.wait()
            ask, prompt, reply = self.forms.ask, self.forms.prompt, answer.reply
            if ask is None or prompt is None or reply is None:
                return
            render = self.forms.renderer(link)
            await self._as_sampled(render, ask, prompt, reply, answer.figures.generated or 0)
            ahead = driver.looks_ahead and ask.claim.hints.prefetch
            begins = await self._as_sent_back(render, ask, reply) if ahead else None
            chance = driver.next_turns.chance(self.record.client, ask.api, reply)
            driver.post(NextKnown(at=driver.now(), request=self.key, tokens=begins, chance=chance))
            render.ends()
        finally:
            driver.learning.discard(self.key)

    async def _as_sampled(
        self, render: TurnRenderer, ask: Ask, prompt: Tokens, reply: Doc, generated: int
    ) -> None:
        """Give the driver the reply's tokens as they were sampled."""
        driver = self._driver
        try:
            tokens = await with_reply(
                render.link, ask, prompt, reply, generated=generated, auth=self._auth, render=render
            )
        except RENDER_FAILURES as error:
            log.debug("reply_not_rendered", request_id=self.id, error=sayable(error))
            return
        if tokens is not None:
            driver.post(ReplyKnown(at=driver.now(), request=self.key, tokens=tokens))

    async def _as_sent_back(self, render: TurnRenderer, ask: Ask, reply: Doc) -> Tokens | None:
        """Return the tokens with which the next turn begins."""
        driver, client = self._driver, self.record.client
        moment = partial(driver.idle_moment, self.key)
        try:
            return await driver.next_turns.prefix(
                render.link, ask, reply, client=client, auth=self._auth, moment=moment, render=render
            )
        except (*RENDER_FAILURES, NotOurs) as error:
            log.debug("next_turn_not_rendered", request_id=self.id, error=sayable(error))
            return None

    def _log(self, answer: Answer, forward: Forward, status: int) -> None:
        figures, usage = answer.figures, self.record.usage
        first, stall = self.record.first_token, self.record.stall
        log.info(
            "request",
            request_id=self.id,
            route=self._api.value,
            status=status,
            engine=forward.engine,
            slot=forward.slot,
            decision=forward.reason.value,
            prompt_tokens=figures.prompt_tokens,
            reused=usage.reused if usage else None,
            computed=usage.computed if usage else None,
            planted=usage.planted if usage else None,
            generated=figures.generated,
            complete=answer.complete,
            error=answer.error,
            **({"key_name": self.key_name} if self.key_name else {}),
            name=self.record.name.without_text,
            model=self.record.model,
            conversation=self.record.named or self.record.conversation,
            seconds=round(self._driver.now() - self.arrived, 4),
            first_token_seconds=None if first is None else round(first, 4),
            stall_seconds=None if stall is None else round(stall, 4),
        )


# -- the two forms of a request ---------------------------------------------------------------------------


@dataclass(slots=True)
class Forms:
    """A request as its client wrote it, and as the rules propose it; one of these is sent."""

    received: bytes = b""  # the client's body
    own: Ask | None = None  # as the client wrote it; None: only the engine can read it
    proposed: Outcome | None = None  # of the rules; None: they change nothing
    rewritten: Ask | None = None  # what they propose
    changed: bool = False  # whether the rules' form is sent
    prompts: tuple[Tokens | None, Tokens | None] = (None, None)  # the prompt of either form
    renderers: tuple[TurnRenderer | None, TurnRenderer | None] = (None, None)  # of either long form

    @property
    def ask(self) -> Ask | None:
        """The form that is sent."""
        return self.rewritten if self.changed else self.own

    @property
    def prompt(self) -> Tokens | None:
        """The prompt of the form that is sent."""
        return self.prompts[self.changed]

    def renderer(self, link: EngineLink) -> TurnRenderer:
        """Return what renders chats that continue the form that is sent, with this engine's template."""
        found = self.renderers[self.changed]
        return found if found and found.link is link else TurnRenderer(link)


# -- what a request costs its key ------------------------------------------------------------------------

BYTES_OF_A_TOKEN: Final = 4  # about, of a body whose tokens are not counted


@dataclass(slots=True)
class Charge:
    """The tokens that engines have computed and generated for one request.

    Of several prompts the engine's figures are those of one, or there are none.
    """

    api: Api
    limited: bool = False  # whether the tokens of its key are limited
    tokens: int = 0  # so far
    left: bool = False  # its client left, or its answer broke off, before it had ended
    inputs: list[Prompt] = field(default_factory=list)  # the prompts of a request with several
    _computes: int | None = None  # their tokens, if they are counted
    _counted: int = 0  # tokens of its slot that were cached, or are in `tokens`, when its client left

    async def count_inputs(self, link: EngineLink, record: Record, *, copies: int) -> None:
        """Count the tokens of embeddings, rankings and several prompts for a limited key, before they run."""
        heavy = record.body_bytes > HEAVY and copies > 1  # not parsed here
        if not (self.inputs or heavy or self.api is Api.TASK):
            return
        count, tokenizer = 0, link.tokenizer
        try:
            for prompt in self.inputs:
                if tokenizer is None:
                    break
                count += len(await tokenizer.tokenize_prompt(prompt))
                await asyncio.sleep(0)  # there may be thousands
        except RENDER_FAILURES as error:
            log.info("not_rendered", request_id=record.request_id, error=sayable(error))
        self._computes = count or record.body_bytes // BYTES_OF_A_TOKEN

    def ended(self, figures: Figures | None, planted: int, *, copies: int) -> None:
        """Add an answer that has ended, and the tokens planted for it. `figures`: None if it is an error.

        All answers of one request count as long as the one of the figures.
        """
        self.left = False
        self.tokens += planted
        if figures is None:
            return
        computed = (figures.prompt_tokens or 0) - (figures.cached or 0)
        if self._computes is not None and not (self.api is Api.TASK and computed):
            computed = self._computes
        self.tokens += computed + (figures.generated or 0) * max(1, copies)

    def left_at(self, computed: int, generated: int, planted: int, *, held: int) -> None:
        """Add what was done when the client left. `held`: cached tokens of its slot, as far as known."""
        own = max(0, computed, self._computes or 0) + generated
        self.tokens += planted + own
        self.left, self._counted = True, own + held

    def of_rest(self, held: int | None) -> int:
        """Return the tokens that the engine computed and generated for this request after its client left.

        `held`: tokens in its slot when the engine released it; None: unknown, which counts as none.
        """
        return max(0, (held or 0) - self._counted)


# -- the answer ------------------------------------------------------------------------------------------

UNREAD: Final = Answer(figures=Figures(), reply=None, complete=False, error=None)


@dataclass(slots=True, eq=False)
class Listener:
    """Reads one answer. The client already has the bytes that are read here."""

    api: Api
    record: Record
    metrics: Metrics
    now: Callable[[], float]  # seconds on the clock of `record.at`
    _reader: AnswerReader | None = None
    _times: TokenTimes = field(default_factory=TokenTimes)

    def begin(self, answer: EngineAnswer) -> None:
        """Start to read an answer. A compressed answer is not read."""
        if "Content-Encoding" not in answer.headers:
            streamed = answer.content_type == EVENT_STREAM
            self._reader = AnswerReader(self.api, stream=streamed, status=answer.status)

    @property
    def events(self) -> int:
        """Number of events read from the stream so far; about one for each generated token."""
        return self._reader.events if self._reader else 0

    def read(self, chunk: bytes) -> None:
        if self._reader is None:
            return
        try:
            self._reader.feed(chunk)
            if self._times.read(self._reader, self.now):
                self.record.times(self._times)
        except Exception:
            log.exception("answer_not_read", request_id=self.record.request_id)
            self._give_up()

    def without(self, progress: ProgressFilter, chunk: bytes) -> bytes:
        """Return the chunk without progress events, and show the progress to observers."""
        left, work = progress.feed(chunk), self.record.work
        if work and progress.latest is not work.progress:
            work.progress, work.progress_at = progress.latest, self.now()
        return left

    def broke_off(self, answer: EngineAnswer) -> bool:
        """Whether the answer ended without its end; False for an answer that is not read."""
        delimited = "Content-Length" in answer.headers or "Transfer-Encoding" in answer.headers
        try:
            return self._reader is not None and self._reader.broke_off(delimited=delimited)
        except Exception:
            log.exception("answer_not_read", request_id=self.record.request_id)
            self._give_up()
            return False

    def end(self) -> Answer:
        """Return the answer, as far as it was read."""
        try:
            return self._reader.close() if self._reader else UNREAD
        except Exception:
            log.exception("answer_not_read", request_id=self.record.request_id)
            self._give_up()
            return UNREAD

    def _give_up(self) -> None:
        self.metrics.fallback("read")
        self._reader = None


# -- the conversation: its name, what the client rewrote, and what that cost -----------------------------

HANDLE_BYTES: Final = 8  # enough that a handle cannot be guessed


@dataclass(slots=True, eq=False)
class ConversationNotes:
    """Records which conversation a request goes on with, its name, and what its client has changed in it.

    On failure the body is sent as it came. No decision depends on a name, so a failure is only logged and
    counted.
    """

    record: Record
    metrics: Metrics
    names: Naming
    headers: Mapping[str, str]
    secrets: Secrets
    given: str | None  # the client's name for its conversation
    rewriting: Rewriting | None = None  # once the request is matched
    taken: Taken | None = None  # the request with its forms; None: no chat, or not read

    async def take(
        self, rewriting: Rewriting, api: Api, doc: Doc, *, context: int, run: Runner = here
    ) -> Taken | None:
        """Match the request and apply the rules; None if it is not a chat, or on failure.

        A slot holds `context` tokens; 0: unknown.
        """
        record, self.rewriting = self.record, rewriting
        try:
            self.taken = await rewriting.take(
                api,
                doc,
                run=run,
                request_id=record.request_id,
                client=record.client,
                headers=self.headers,
                size=record.body_bytes,
                now=record.at,
                context=context,
            )
            if self.taken is not None:
                self.taken.keyed = record.keyed
        except Exception:
            log.exception("rewrite_failed", request_id=record.request_id)
            self.metrics.fallback("rewrite")
        self.name()
        return self.taken

    def name(self) -> None:
        """Update the name by what is known so far."""
        record, taken = self.record, self.taken
        line = taken.conversation if taken else None
        try:
            if line is not None:
                record.name = self.names.name(
                    record.client,
                    self.headers,
                    line,
                    coming=record.name,
                    given=self.given,
                    now=record.at,
                )
            else:
                before = taken.match.before if taken else None
                record.name = self.names.coming(
                    record.client,
                    self.headers,
                    taken.received if taken else None,
                    before=before.number if before else None,
                    given=self.given,
                    now=record.at,
                )
            record.name.handle = record.name.handle or token_hex(HANDLE_BYTES)
            if record.keyed:
                record.name.task = record.name.title = ""
        except Exception:
            log.exception("not_named", request_id=record.request_id)
            self.metrics.fallback("explain")

    def goes(self, *, changed: bool) -> None:
        """Record the form in which the request is sent."""
        if self.rewriting and self.taken:
            self.rewriting.goes(self.taken, changed=changed)

    def settle(self) -> None:
        """Find the conversation and the changes, while the engine works on the request.

        It may be called many times.
        """
        taken, record = self.taken, self.record
        if taken is None or self.rewriting is None:
            return
        if taken.judged is None:
            try:
                judged = self.rewriting.settle(taken)
            except Exception as error:  # noqa: BLE001 - of whatever kind the bug is
                self._failed(error)
                return
            if judged is not None:
                record.kind, record.changes = judged.explained.kind, taken.changes
        if taken.conversation is not None:
            record.conversation = taken.conversation.number
            named = record.named or request_id(taken.conversation.who.name, str)
            record.named = (
                named if named and not self.secrets.stand_in(named) else None
            )  # it may be of the body
            self.name()

    def replied(self, reply: Doc) -> None:
        """Keep the reply. If the agent has asked for a title, it is the answer."""
        taken = self.taken
        if taken is None or self.rewriting is None:
            return
        try:
            self.rewriting.replied(taken, reply)
        except Exception as error:  # noqa: BLE001 - of whatever kind the bug is
            self._failed(error)
            return
        try:
            self.names.answered(self.record.client, taken.received, reply)
        except Exception:
            log.exception("not_named", request_id=self.record.request_id)
            self.metrics.fallback("explain")

    def answered(self, figures: Figures, prompt: Tokens | None, *, planted: int) -> None:
        """Record what the request's own changes have cost. `planted` tokens were computed before that."""
        if self.taken is None or self.rewriting is None:
            return
        try:
            self.record.divergence = self.rewriting.answered(
                self.taken, prompt, figures, planted=planted, decision=self.record.decision
            )
        except Exception as error:  # noqa: BLE001 - of whatever kind the bug is
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        log.error("explanation_failed", request_id=self.record.request_id, exc_info=error)
        self.metrics.fallback("explain")
        self.taken = None
