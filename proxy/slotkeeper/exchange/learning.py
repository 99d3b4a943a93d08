"""What is learned from a request beside its relay: its answer, its reply's tokens, its conversation and name.

Nothing here can harm the request: a failure is counted, and its result is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from secrets import token_hex
from typing import Final

import aiohttp

from slotkeeper.api.answer import Answer, AnswerReader, ProgressFilter
from slotkeeper.api.answer_builder import Figures
from slotkeeper.api.document import Doc, NotOurs
from slotkeeper.api.head import Api, request_id
from slotkeeper.api.request import Ask
from slotkeeper.api.waits import TokenTimes
from slotkeeper.conversation.naming import Naming
from slotkeeper.observe.log import get_logger, sayable
from slotkeeper.observe.metrics import Metrics
from slotkeeper.observe.request_record import Record
from slotkeeper.runtime import render
from slotkeeper.runtime.driver import Driver
from slotkeeper.runtime.link import EngineLink
from slotkeeper.runtime.rewriting import Rewriting, Taken
from slotkeeper.runtime.tasks import Runner, here
from slotkeeper.scheduler.events import NextKnown, ReplyKnown
from slotkeeper.scheduler.tokens import Tokens
from slotkeeper.scheduler.types import RequestId

UNREAD: Final = Answer(figures=Figures(), reply=None, complete=False, error=None)

log = get_logger(__name__)


class Listener:
    """Reads one answer. The client already has the bytes that are read here."""

    def __init__(self, api: Api, record: Record, metrics: Metrics, now: Callable[[], float]) -> None:
        """`now` returns seconds on the clock of `record.at`."""
        self._api = api
        self._record = record
        self._metrics = metrics
        self._now = now
        self._reader: AnswerReader | None = None
        self._times = TokenTimes()

    def begin(self, answer: aiohttp.ClientResponse) -> None:
        """Start to read an answer. A compressed answer is not read."""
        if "Content-Encoding" not in answer.headers:
            streamed = answer.content_type == "text/event-stream"
            self._reader = AnswerReader(self._api, stream=streamed, status=answer.status)

    @property
    def events(self) -> int:
        """Number of events read from the stream so far; about one for each generated token."""
        return self._reader.events if self._reader else 0

    def read(self, chunk: bytes) -> None:
        if self._reader is None:
            return
        try:
            self._reader.feed(chunk)
            if self._times.read(self._reader, self._now):
                self._record.times(self._times)
        except Exception:
            log.exception("answer_not_read", request_id=self._record.request_id)
            self._give_up()

    def without(self, progress: ProgressFilter) -> Callable[[bytes], bytes]:
        """Return a function that removes progress events from chunks, and shows the progress to observers."""

        def rest(chunk: bytes) -> bytes:
            left, work = progress.feed(chunk), self._record.work
            if work and progress.latest is not work.progress:
                work.progress, work.progress_at = progress.latest, self._now()
            return left

        return rest

    def broke_off(self, answer: aiohttp.ClientResponse) -> bool:
        """Whether the answer ended without its end; False for an answer that is not read."""
        delimited = "Content-Length" in answer.headers or "Transfer-Encoding" in answer.headers
        try:
            return self._reader is not None and self._reader.broke_off(delimited=delimited)
        except Exception:
            log.exception("answer_not_read", request_id=self._record.request_id)
            self._give_up()
            return False

    def end(self) -> Answer:
        """Return the answer, as far as it was read."""
        try:
            return self._reader.close() if self._reader else UNREAD
        except Exception:
            log.exception("answer_not_read", request_id=self._record.request_id)
            self._give_up()
            return UNREAD

    def _give_up(self) -> None:
        self._metrics.fallback("read")
        self._reader = None


# -- after the answer: the reply's tokens as sampled, and as the next turn begins with them --------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredRequest:
    """A request whose answer is complete."""

    request: RequestId
    request_id: str  # the client's name for it
    client: str
    auth: Mapping[str, str]
    ask: Ask
    prompt: Tokens
    reply: Doc
    generated: int  # tokens


async def learn(driver: Driver, link: EngineLink, answered: AnsweredRequest) -> None:
    """Render the reply and the next turn's prefix for the driver; if rendering fails, nothing is known."""
    await _as_sampled(driver, link, answered)
    ahead = driver.looks_ahead and answered.ask.claim.hints.prefetch
    begins = await _as_sent_back(driver, link, answered) if ahead else None
    chance = driver.next_turns.chance(answered.client, answered.ask.api, answered.reply)
    driver.post(NextKnown(at=driver.now(), request=answered.request, tokens=begins, chance=chance))


async def _as_sampled(driver: Driver, link: EngineLink, answered: AnsweredRequest) -> None:
    try:
        tokens = await render.with_reply(
            link,
            answered.ask,
            answered.prompt,
            answered.reply,
            generated=answered.generated,
            auth=answered.auth,
        )
    except render.FAILURES as error:
        log.debug("reply_not_rendered", request_id=answered.request_id, error=sayable(error))
        return
    if tokens is not None:
        driver.post(ReplyKnown(at=driver.now(), request=answered.request, tokens=tokens))


async def _as_sent_back(driver: Driver, link: EngineLink, answered: AnsweredRequest) -> Tokens | None:
    try:
        return await driver.next_turns.prefix(
            link,
            answered.ask,
            answered.reply,
            client=answered.client,
            auth=answered.auth,
            moment=lambda: driver.idle_moment(answered.request),
        )
    except (*render.FAILURES, NotOurs) as error:
        log.debug("next_turn_not_rendered", request_id=answered.request_id, error=sayable(error))
        return None


# -- the conversation: its name, what the client rewrote, and what that cost -----------------------------


HANDLE_BYTES: Final = 8  # enough that a handle cannot be guessed


class NameKeeper:
    """Writes the name of a request's conversation into its record.

    No decision depends on a name, so a failure is only logged and counted.
    """

    def __init__(
        self, names: Naming, metrics: Metrics, record: Record, headers: Mapping[str, str], given: str | None
    ) -> None:
        """`given` is the client's name for its conversation."""
        self._names = names
        self._metrics = metrics
        self._record = record
        self._headers = headers
        self._given = given

    def update(self, taken: Taken | None) -> None:
        """Update the name by what is known so far."""
        record, line = self._record, taken.conversation if taken else None
        try:
            if line is not None:
                record.name = self._names.name(
                    record.client,
                    self._headers,
                    line,
                    coming=record.name,
                    given=self._given,
                    now=record.at,
                )
            else:
                before = taken.match.before if taken else None
                record.name = self._names.coming(
                    record.client,
                    self._headers,
                    taken.received if taken else None,
                    before=before.number if before else None,
                    given=self._given,
                    now=record.at,
                )
            record.name.handle = record.name.handle or token_hex(HANDLE_BYTES)
            if record.keyed:
                record.name.task = record.name.title = ""
        except Exception:
            log.exception("not_named", request_id=record.request_id)
            self._metrics.fallback("explain")

    def answered(self, taken: Taken | None, answer: Answer) -> None:
        """Take the answer as a title if the agent has asked for one."""
        if taken and answer.reply and answer.complete:
            try:
                self._names.answered(self._record.client, taken.received, answer.reply)
            except Exception:
                log.exception("not_named", request_id=self._record.request_id)
                self._metrics.fallback("explain")


class Explaining:
    """Writes the conversation and its changes to the record. On failure the body is sent as it came."""

    def __init__(self, rewriting: Rewriting, metrics: Metrics, record: Record, context: int) -> None:
        """A slot holds `context` tokens; 0: unknown."""
        self._rewriting = rewriting
        self._metrics = metrics
        self._context = context
        self._record = record
        self.taken: Taken | None = None  # the request with its forms; None: no chat, or not read

    async def take(
        self, api: Api, doc: Doc, *, headers: Mapping[str, str], run: Runner = here
    ) -> Taken | None:
        """Match the request and apply the rules; None if it is not a chat, or on failure."""
        record = self._record
        try:
            self.taken = await self._rewriting.take(
                api,
                doc,
                run=run,
                request_id=record.request_id,
                client=record.client,
                headers=headers,
                size=record.body_bytes,
                now=record.at,
                context=self._context,
            )
            if self.taken is not None:
                self.taken.keyed = record.keyed
        except Exception:
            log.exception("rewrite_failed", request_id=record.request_id)
            self._metrics.fallback("rewrite")
        return self.taken

    def goes(self, *, changed: bool) -> None:
        """Record the form in which the request is sent."""
        if self.taken is not None:
            self._rewriting.goes(self.taken, changed=changed)

    @property
    def rules(self) -> list[str]:
        """The names of the rules whose changes the rewritten form has."""
        return self.taken.rules if self.taken else []

    def settle(self) -> None:
        """Find the conversation and the changes, once, while the engine works on the request."""
        taken, record = self.taken, self._record
        if taken is None or taken.judged is not None:
            return
        try:
            judged, line = self._rewriting.settle(taken), taken.conversation
        except Exception:
            log.exception("explanation_failed", request_id=record.request_id)
            self._failed()
            return
        if line is not None:
            record.conversation = line.number
            record.named = record.named or request_id(line.who.name, str) or None
        if judged is not None:
            record.kind, record.changes = judged.explained.kind, taken.changes

    def answered(self, answer: Answer, prompt: Tokens | None, *, planted: int) -> None:
        """Record the cost of the request's own changes. `planted` tokens were computed before it was sent."""
        self.settle()
        if self.taken is None:
            return
        try:
            reply = answer.reply if answer.complete else None
            self._record.divergence = self._rewriting.answered(
                self.taken,
                reply,
                prompt,
                answer.figures,
                planted=planted,
                decision=self._record.decision,
            )
        except Exception:
            log.exception("explanation_failed", request_id=self._record.request_id)
            self._failed()

    def _failed(self) -> None:
        self._metrics.fallback("explain")
        self.taken = None
