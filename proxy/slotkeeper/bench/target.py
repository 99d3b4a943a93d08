"""One server under measurement: send it a request, and know what that cost, by the engine's own counter.

The server may be an engine or a sidecar in front of one: both render and tokenize, so the exact prompt
is known, and with it the oracle. The rendering is not part of any time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final, Self

import httpx
import orjson
from prometheus_client.parser import text_string_to_metric_families

from slotkeeper.api.answer import Answer, AnswerReader
from slotkeeper.api.document import Doc, rows, table
from slotkeeper.api.head import PLANTED, REWRITTEN, Api, classify
from slotkeeper.api.request import Ask, NotOurs, parse
from slotkeeper.bench.measure import Oracle, Sample
from slotkeeper.engine.client import EngineClient, EngineError, EngineGoneError, message_in
from slotkeeper.scheduler.figures import Usage, usage_of
from slotkeeper.scheduler.types import Tokens

EVALUATED: Final = "llamacpp:prompt_tokens_total"  # without what was cached; what was broken off counts too


class Counter:
    """Prompt tokens evaluated by all engines at some URLs. Use as an async context manager.

    A sidecar's data port passes the question on to the engine behind it.
    """

    def __init__(self, urls: Iterable[str]) -> None:
        self._clients = [EngineClient(url) for url in urls]
        self._last: dict[str, int] = {}
        self._exits = AsyncExitStack()
        self.total: int | None = 0  # since it was read first; None: not all of them tell

    def __repr__(self) -> str:
        return f"<Counter of {len(self._clients)} engines: {self.total}>"

    async def __aenter__(self) -> Self:
        for client in self._clients:
            await self._exits.enter_async_context(client)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()

    async def read(self) -> int | None:
        """An engine that counts less than before was restarted: all that it counts is new."""
        for client in self._clients:
            try:
                now = counted(await client.metrics())
            except (EngineError, EngineGoneError, ValueError):  # such as 501 without --metrics
                self.total = None
                break
            before = self._last.get(client.base, now)
            self._last[client.base] = now
            if self.total is not None:
                self.total += now - before if now >= before else now
        return self.total


def counted(metrics: str) -> int:
    """Of an engine's /metrics. Raises ValueError where it is not there."""
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == EVALUATED:
                return int(sample.value)
    raise ValueError(f"no {EVALUATED}")


# -- one server under measurement ------------------------------------------------------------------------

PATIENT: Final = httpx.Timeout(None, connect=5.0)  # a prefill takes as long as it takes
TEXT_ID: Final = b'"id":'  # in the body of an answer with token probabilities


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
    """One answer: what it cost, and what was said."""

    sample: Sample
    reply: Doc | None


class Target:
    """Use as an async context manager. One request at a time, so that the oracle has an order."""

    def __init__(self, base: str, engines: Sequence[str] = ()) -> None:
        """`engines`: those behind it, whose counters are read; else the server is asked to pass it on."""
        self.base = base.rstrip("/")
        self.counter = Counter(engines or (self.base,))
        self.oracle = Oracle()
        self._told: int | None = 0  # by the counter, after the request before
        self._engine = EngineClient(self.base)
        # llama-server closes a connection after a stream, though it promises to keep it.
        self._http = httpx.AsyncClient(timeout=PATIENT, headers={"Connection": "close"})
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
        """Tells engines apart: their media marker is random (both builds).

        Raises EngineError, EngineGoneError.
        """
        return str((await self._engine.props()).get("media_marker", self.base))

    async def fire(self, shot: Shot) -> Hit:
        """Send it and wait for the end of the answer. Never raises for what the server does."""
        api = classify("POST", shot.path.partition("?")[0])
        data = orjson.dumps(shot.body)
        prompt = await self._prompt(api, data)
        oracle = self.oracle.least(prompt) if prompt else None
        before = self._told
        try:
            timed = await self._send(api, shot, data)
        except httpx.HTTPError as error:
            failure = f"{type(error).__name__}: {error}"
            return Hit(sample=Sample(session=shot.session, label=shot.label, failure=failure), reply=None)
        answer, figures = timed.answer, timed.answer.figures
        self._told = await self.counter.read()
        usage, idle = _divided(timed, before, self._told)
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
            exact=prompt is None or figures.prompt_tokens in (None, len(prompt)),
            failure=timed.failure,
        )
        return Hit(sample=sample, reply=answer.reply)

    async def _send(self, api: Api, shot: Shot, data: bytes) -> _Timed:
        started, spoke = time.perf_counter(), None
        headers = {**shot.headers, "Content-Type": "application/json"}
        async with self._http.stream(
            "POST", self.base + shot.path, content=data, headers=headers
        ) as response:
            streamed = "event-stream" in response.headers.get("Content-Type", "")
            reader = AnswerReader(api, stream=streamed, status=response.status_code)
            chunks: list[bytes] = []
            async for chunk in response.aiter_bytes():
                reader.feed(chunk)
                chunks.append(chunk)
                if spoke is None and reader.first_token():
                    spoke = time.perf_counter() - started
        took = time.perf_counter() - started
        answer, body = reader.close(), b"".join(chunks)
        first = spoke if streamed else _before_generating(took, answer)
        kept = _kept(body, streamed=streamed, generated=answer.figures.generated or 0)
        planted = _said(PLANTED, response, body)
        return _Timed(
            answer=answer,
            first_token_seconds=first,
            kept=kept,
            planted=int(planted) if planted and planted.isdigit() else None,
            rewritten=_said(REWRITTEN, response, body) is not None,
            failure=_failure(response.status_code, answer, body),
        )

    async def _prompt(self, api: Api, data: bytes) -> Tokens | None:
        """The exact prompt; None where only the engine can know it."""
        try:
            ask = parse(api, data)
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
    kept: list[int]
    planted: int | None  # None: no sidecar said so
    rewritten: bool
    failure: str | None


def _divided(timed: _Timed, before: int | None, after: int | None) -> tuple[Usage | None, int | None]:
    """The usage, and what the engines computed besides since the request before; None: they do not tell.

    Less than the answer's own figure is told by an engine that was not the one that answered.
    """
    figures = timed.answer.figures
    usage = usage_of(figures.prompt_tokens, figures.cached, planted=timed.planted or 0)
    if before is None or after is None:
        return usage, None
    besides = after - before - (usage.work if usage else 0)
    return usage, besides if besides >= 0 else None


def _failure(status: int, answer: Answer, body: bytes) -> str | None:
    if status >= 400:
        return f"{status}: {message_in(body)}"
    return answer.error or (None if answer.complete else "the answer broke off")


def _said(name: str, response: httpx.Response, body: bytes) -> str | None:
    """A label of the sidecar: a header, or a comment in a stream whose head was out before it was known."""
    late = re.findall(rb"^: " + name.encode() + rb": (.+)$", body, re.MULTILINE)
    said = late[-1].decode().strip() if late else response.headers.get(name)
    return str(said) if said is not None else None


def _before_generating(took: float, answer: Answer) -> float | None:
    """Of an answer in one piece: all of its time but that of generating, which the engine tells."""
    generating = answer.figures.generate_ms
    return None if generating is None else max(0.0, took - generating / 1000)


def _kept(body: bytes, *, streamed: bool, generated: int) -> list[int]:
    """The ids of the reply that a slot keeps, all but the last; none without `logprobs` in the request.

    A stream leaves out the end-of-turn token, which is that last one.
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
