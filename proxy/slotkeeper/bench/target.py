"""A server under measurement: sends a request and returns its cost by the engine's own counter.

The server may be an engine or a sidecar in front of one. Both render and tokenize, so the exact prompt is
known, and with it the oracle. Measured times exclude this rendering.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Self

import httpx
import orjson
from prometheus_client.parser import text_string_to_metric_families

from slotkeeper.api.answers.answer import Answer, AnswerReader, TokenTimes
from slotkeeper.api.document import Doc, NotOurs, rows, table
from slotkeeper.api.head import PLANTED, REWRITTEN, Api, classify
from slotkeeper.api.request import Ask, parse
from slotkeeper.bench.measure import Oracle, Sample
from slotkeeper.engine.answers import EngineError, EngineGoneError
from slotkeeper.engine.client import EngineClient, message_in
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.requests.figures import Usage, usage_of

EVALUATED: Final = "llamacpp:prompt_tokens_total"  # without cached tokens; includes cancelled requests


class Counter:
    """Counts the prompt tokens evaluated by the engines at some URLs. Use as an async context manager.

    A sidecar's data port forwards the request for metrics to its engine.
    """

    def __init__(self, urls: Iterable[str]) -> None:
        self._clients = [EngineClient(url) for url in urls]
        self._last: dict[str, int] = {}
        self._exits = AsyncExitStack()
        self.total: int | None = 0  # tokens since the first read; None: some engine does not report them

    def __repr__(self) -> str:
        return f"<Counter of {len(self._clients)} engines: {self.total}>"

    async def __aenter__(self) -> Self:
        for client in self._clients:
            await self._exits.enter_async_context(client)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()

    async def read(self) -> int | None:
        """Read all counters; return the total. If one fell, its engine was restarted: all of it is new."""
        for client in self._clients:
            try:
                now = counted(await client.metrics())
            except (EngineError, EngineGoneError, ValueError):  # for example 501 without --metrics
                self.total = None
                break
            before = self._last.get(client.base, now)
            self._last[client.base] = now
            if self.total is not None:
                self.total += now - before if now >= before else now
        return self.total


def counted(metrics: str) -> int:
    """Return the counter in an engine's /metrics. Raises ValueError if it is missing."""
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == EVALUATED:
                return int(sample.value)
    raise ValueError(f"no {EVALUATED}")


# -- one server under measurement ------------------------------------------------------------------------

PATIENT: Final = httpx.Timeout(None, connect=5.0)  # no limit for a prefill
TEXT_ID: Final = b'"id":'  # occurs in answers with logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """One request to be sent."""

    session: str
    label: str
    path: str
    body: Doc
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """One answer: its cost, and the assistant's message."""

    sample: Sample
    reply: Doc | None


class Target:
    """A server under measurement. Use as an async context manager.

    It sends one request at a time, so that the oracle knows their order, unless it does not watch.
    """

    def __init__(
        self,
        base: str,
        engines: Sequence[str] = (),
        *,
        watches: bool = True,
        renders: str | None = None,
        silence_seconds: float | None = None,
    ) -> None:
        """`engines` are the URLs whose counters are read; without them the server's own /metrics is read.

        `renders`: the URL that renders prompts, if not the server itself. `silence_seconds`: after which a
        request has failed; None: a prefill has no limit.

        Unless it `watches`, neither the oracle nor idle tokens are known, nothing is sent to the server
        between two requests, and requests may be sent at the same time.
        """
        self._watches = watches
        self.base = base.rstrip("/")
        self.counter = Counter(engines or (self.base,))
        self.oracle = Oracle()
        self._counted: int | None = 0  # the counter after the last request
        self._engine = EngineClient(renders or self.base)
        # llama-server closes a connection after a stream, although it announces keep-alive.
        timeout = httpx.Timeout(silence_seconds, connect=PATIENT.connect)
        self._http = httpx.AsyncClient(timeout=timeout, headers={"Connection": "close"})
        self._exits = AsyncExitStack()

    def __repr__(self) -> str:
        return f"<Target {self.base} {self.oracle!r}>"

    async def __aenter__(self) -> Self:
        await self._exits.enter_async_context(self._engine)
        await self._exits.enter_async_context(self._http)
        await self._exits.enter_async_context(self.counter)
        await self.counter.read()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()

    async def process(self) -> str:
        """Return a value that differs for each engine process: the random media marker (both builds).

        Raises EngineError, EngineGoneError.
        """
        return str((await self._engine.props()).get("media_marker", self.base))

    async def fire(self, shot: Shot) -> Hit:
        """Send a request and wait for the end of the answer. A server's errors are in the result."""
        api = classify("POST", shot.path.partition("?")[0])
        data = orjson.dumps(shot.body)
        prompt = await self.prompt(shot) if self._watches else None
        oracle = self.oracle.least(prompt) if prompt else None
        before = self._counted if self._watches else None
        try:
            timed = await self._send(api, shot, data)
        except httpx.HTTPError as error:
            failure = f"{type(error).__name__}: {error}"
            return Hit(sample=Sample(session=shot.session, label=shot.label, failure=failure), reply=None)
        answer, figures = timed.answer, timed.answer.figures
        if self._watches:
            self._counted = await self.counter.read()
        usage, idle = _divided(timed, before, self._counted)
        if prompt and not timed.failure:
            self.oracle.saw(prompt + Tokens(timed.kept))
        sample = Sample(
            session=shot.session,
            label=shot.label,
            usage=usage,
            idle=idle,
            oracle=oracle,
            generated=max(0, (figures.generated or 0) - 1 - len(timed.kept)),
            rewritten=timed.rewritten,
            first_token_seconds=timed.first_token_seconds,
            prefill_seconds=None if figures.prefill_ms is None else figures.prefill_ms / 1000,
            stall_seconds=timed.stall_seconds,
            exact=prompt is None or figures.prompt_tokens in (None, len(prompt)),
            failure=timed.failure,
        )
        return Hit(sample=sample, reply=answer.reply)

    async def _send(self, api: Api, shot: Shot, data: bytes) -> _Timed:
        started, times = time.perf_counter(), TokenTimes()
        headers = {**shot.headers, "Content-Type": "application/json"}
        async with self._http.stream(
            "POST", self.base + shot.path, content=data, headers=headers
        ) as response:
            streamed = "event-stream" in response.headers.get("Content-Type", "")
            reader = AnswerReader(api, stream=streamed, status=response.status_code)
            chunks = list[bytes]()
            async for chunk in response.aiter_bytes():
                reader.feed(chunk)
                chunks.append(chunk)
                times.read(reader, time.perf_counter)
        took = time.perf_counter() - started
        answer, body = reader.close(), b"".join(chunks)
        if streamed:
            first = None if times.first is None else times.first - started
        else:  # by the engine's timings
            generating = answer.figures.generate_ms
            first = None if generating is None else max(0.0, took - generating / 1000)
        failure = answer.error or (None if answer.complete else "the answer broke off")
        if response.status_code >= 400:
            failure = f"{response.status_code}: {message_in(body)}"
        kept = _kept(body, streamed=streamed, generated=answer.figures.generated or 0)
        planted = _said(PLANTED, response, body)
        return _Timed(
            answer=answer,
            first_token_seconds=first,
            stall_seconds=times.stall,
            kept=kept,
            planted=int(planted) if planted and planted.isdigit() else None,
            rewritten=_said(REWRITTEN, response, body) is not None,
            failure=failure,
        )

    async def prompt(self, shot: Shot) -> Tokens | None:
        """Return the exact prompt of a request; None if only the engine can know it."""
        try:
            ask = parse(classify("POST", shot.path.partition("?")[0]), orjson.dumps(shot.body))
            content = await self._content(ask)
            if content is None:
                return None
            ids = await self._engine.tokenize(content, add_special=True, parse_special=True)
        except (NotOurs, EngineError, EngineGoneError):
            return None
        return Tokens(ids) if ids else None

    async def _content(self, ask: Ask) -> str | list[Any] | None:
        return await self._engine.apply_template(ask.chat) if ask.chat is not None else ask.prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    answer: Answer
    first_token_seconds: float | None
    stall_seconds: float | None
    kept: list[int]
    planted: int | None  # None: no sidecar reported it
    rewritten: bool
    failure: str | None


def _divided(timed: _Timed, before: int | None, after: int | None) -> tuple[Usage | None, int | None]:
    """Return the usage, and the other tokens that the engines computed since the last request; None: unknown.

    The counters may show less than the answer's own figure. Then another engine has answered: unknown.
    """
    figures = timed.answer.figures
    usage = usage_of(figures.prompt_tokens, figures.cached, planted=timed.planted or 0)
    if before is None or after is None:
        return usage, None
    besides = after - before - (usage.work if usage else 0)
    return usage, besides if besides >= 0 else None


def _said(name: str, response: httpx.Response, body: bytes) -> str | None:
    """Return a header of the sidecar; in a stream it is a comment if it became known after the head."""
    late = re.findall(rb"^: " + name.encode() + rb": (.+)$", body, re.MULTILINE)
    value = late[-1].decode().strip() if late else response.headers.get(name)
    return str(value) if value is not None else None


def _kept(body: bytes, *, streamed: bool, generated: int) -> list[int]:
    """Return the ids of the reply that a slot keeps, all but the last; none if the request had no `logprobs`.

    A stream leaves out the end-of-turn token, which is the last one.
    """
    if TEXT_ID not in body:
        return []
    ids = [id_ for doc in _documents(body, streamed) for id_ in _ids(doc)]
    kept = max(0, generated - 1)
    return ids[:kept] if len(ids) >= kept else []


def _documents(body: bytes, streamed: bool) -> Iterator[Doc]:
    parts = (line[6:] for line in body.split(b"\n") if line.startswith(b"data: {")) if streamed else (body,)
    for part in parts:
        try:
            yield orjson.loads(part)
        except orjson.JSONDecodeError:
            continue


def _ids(doc: Doc) -> Iterator[int]:
    for choice in rows(doc.get("choices"))[:1]:
        for token in rows(table(choice, "logprobs").get("content")):
            if isinstance(id_ := token.get("id"), int):
                yield id_


# -- playing a script of requests -----------------------------------------------------------------------
# A script is a generator: it yields a `Turn`, receives the assistant's message, and builds the next request
# from it, as a client does.

CHAT: Final = "/v1/chat/completions"
SILENCE: Final[Doc] = {"role": "assistant", "content": "x"}  # lets a script continue after a failure
# The tiny models' template without thinking: a reply renders in the history as it was sampled.
PLAIN: Final[Mapping[str, Any]] = MappingProxyType({"chat_template_kwargs": {"plain": True}})


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One chat request."""

    label: str
    messages: tuple[Doc, ...]
    max_tokens: int = 64
    fields: Mapping[str, Any] = field(default_factory=lambda: PLAIN)  # further fields of the body
    session: str | None = None  # the session of this request, if the script plays several

    def body(self) -> Doc:
        """Return the request's body; greedy sampling, so that two runs get the same answers."""
        fixed = {"messages": list(self.messages), "max_tokens": self.max_tokens, "temperature": 0}
        return {**fixed, **self.fields}


Script = Generator[Turn, Doc, None]


async def at_once(_: Turn) -> None:
    """Do nothing before a turn."""


async def play(
    script: Script,
    target: Target,
    *,
    session: str,
    seen: Callable[[Sample], Any] = lambda _: None,
    sent: Callable[[Shot], Any] = lambda _: None,
    before: Callable[[Turn], Awaitable[None]] = at_once,
) -> list[Sample]:
    """Send every turn of `script`, one after the other.

    `session` is the session of turns that name none. `before` is awaited before each turn; `sent` is called
    with each request before it is sent, and `seen` with each sample.
    """
    samples: list[Sample] = []
    reply: Doc | None = None
    while True:
        try:
            turn = next(script) if reply is None else script.send(reply)
        except StopIteration:
            return samples
        await before(turn)
        # The logprobs carry the ids of the sampled tokens, which the oracle needs. In a stream with tools the
        # engine refuses them (400), so no request is streamed.
        body = {**turn.body(), "logprobs": True}
        shot = Shot(session=turn.session or session, label=turn.label, path=CHAT, body=body, headers={})
        sent(shot)
        hit = await target.fire(shot)
        samples.append(hit.sample)
        seen(hit.sample)
        reply = spoken(hit.reply) if hit.reply else SILENCE


def spoken(reply: Doc) -> Doc:
    """Return the reply as a client sends it back: without tool calls that `max_tokens` truncated."""
    try:
        for call in reply.get("tool_calls") or ():
            orjson.loads(call["function"]["arguments"])
    except orjson.JSONDecodeError:
        return {key: value for key, value in reply.items() if key != "tool_calls"}
    return reply
