"""Reports one request to the driver and the metrics: its prompt, its answer, its end, its reply.

Nothing in this file may harm a request: a failure is counted, and its result is left out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from secrets import token_hex
from typing import Final

import aiohttp
import orjson

from slotkeeper.api.answers.answer import Answer, AnswerReader, ProgressFilter, TokenTimes
from slotkeeper.api.answers.answer_builder import Figures
from slotkeeper.api.document import Doc, NotOurs, Prompt
from slotkeeper.api.errors import Fault, outcome_by, too_long
from slotkeeper.api.head import Api, Secrets, request_id
from slotkeeper.api.request import (
    HEAVY,
    LARGE,
    NOTHING_ASKED,
    UNNAMED,
    Ask,
    Claim,
    PromptSize,
    check_lists,
    inputs_of,
    is_large,
    model_of,
    read,
    size_of,
    understood,
)
from slotkeeper.conversation.likeness import asks_aside
from slotkeeper.conversation.naming import Naming
from slotkeeper.conversation.rules.apply import Outcome
from slotkeeper.engine.answers import EngineGoneError
from slotkeeper.observe.log import get_logger, sayable
from slotkeeper.observe.metrics import Metrics
from slotkeeper.observe.request_record import BRIEFEST_WAIT, Record, RequestStage
from slotkeeper.runtime.driver import LATEST, Driver
from slotkeeper.runtime.heavy import Weighed, Weigher
from slotkeeper.runtime.link import EngineLink
from slotkeeper.runtime.render import RENDER_FAILURES, boundaries_of, prompt_of, with_reply
from slotkeeper.runtime.rewriting import Rewriting, Taken
from slotkeeper.runtime.tasks import Runner, here
from slotkeeper.scheduler.effects import Forward
from slotkeeper.scheduler.events import Finished, Gone, NextKnown, Rendered, ReplyKnown
from slotkeeper.scheduler.prompts.tokens import Boundary, Tokens
from slotkeeper.scheduler.requests.figures import Unknown, usage_of
from slotkeeper.scheduler.types import NO_ROUTER, ModelName, Reason, RequestHints, RequestId
from slotkeeper.vocab.tokenizer import TokenizeError

# On other routes a different count may come from our conversion of the body.
OUR_TOKENIZER: Final = frozenset({Api.CHAT, Api.COMPLETION, Api.COMPLETIONS})

Found = tuple[Tokens | None, tuple[Boundary, ...]]
NOT_FOUND: Final[Found] = (None, ())
NO_SECRETS: Final = Secrets(frozenset())

log = get_logger(__name__)


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
        """Render a brief request, and learn its reply once nobody is served.

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
            if self._answered is not None:
                await self._learn_reply(*self._answered)
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
            (own, boundaries), (rewritten, others) = found
            self.forms.prompts = (own, rewritten)
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
        """Return the prompt's tokens and its boundaries. Raises what `render` raises."""
        large = self.record.body_bytes > LARGE
        async with self._driver.large_renders if large else nullcontext():
            prompt = await prompt_of(link, ask, self._auth)
            return (prompt, () if prompt is None else await boundaries_of(link, ask, prompt, self._auth))

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
        if prompt.chunks:
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
            await self._as_sampled(link, ask, prompt, reply, answer.figures.generated or 0)
            ahead = driver.looks_ahead and ask.claim.hints.prefetch
            begins = await self._as_sent_back(link, ask, reply) if ahead else None
            chance = driver.next_turns.chance(self.record.client, ask.api, reply)
            driver.post(NextKnown(at=driver.now(), request=self.key, tokens=begins, chance=chance))
        finally:
            driver.learning.discard(self.key)

    async def _as_sampled(
        self, link: EngineLink, ask: Ask, prompt: Tokens, reply: Doc, generated: int
    ) -> None:
        """Give the driver the reply's tokens as they were sampled."""
        driver = self._driver
        try:
            tokens = await with_reply(link, ask, prompt, reply, generated=generated, auth=self._auth)
        except RENDER_FAILURES as error:
            log.debug("reply_not_rendered", request_id=self.id, error=sayable(error))
            return
        if tokens is not None:
            driver.post(ReplyKnown(at=driver.now(), request=self.key, tokens=tokens))

    async def _as_sent_back(self, link: EngineLink, ask: Ask, reply: Doc) -> Tokens | None:
        """Return the tokens with which the next turn begins."""
        driver, client = self._driver, self.record.client
        moment = partial(driver.idle_moment, self.key)
        try:
            return await driver.next_turns.prefix(
                link, ask, reply, client=client, auth=self._auth, moment=moment
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

    @property
    def ask(self) -> Ask | None:
        """The form that is sent."""
        return self.rewritten if self.changed else self.own

    @property
    def prompt(self) -> Tokens | None:
        """The prompt of the form that is sent."""
        return self.prompts[self.changed]


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

    def begin(self, answer: aiohttp.ClientResponse) -> None:
        """Start to read an answer. A compressed answer is not read."""
        if "Content-Encoding" not in answer.headers:
            streamed = answer.content_type == "text/event-stream"
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

    def broke_off(self, answer: aiohttp.ClientResponse) -> bool:
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
            self.metrics.fallback("explain")

    def _failed(self, error: Exception) -> None:
        log.error("explanation_failed", request_id=self.record.request_id, exc_info=error)
        self.metrics.fallback("explain")
        self.taken = None
