"""Reads the engine's answers: server-sent events, progress of the prefill, figures, reply, and waits.

Nothing here raises: content that cannot be read is skipped, and the client gets all bytes anyway.
Each API has a reading class in its own module; this module feeds it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from operator import mul
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

import orjson

from slotkeeper.api.answers.answer_builder import AnswerBuilder, Figures
from slotkeeper.api.document import Doc
from slotkeeper.api.formats.anthropic import AnthropicReading
from slotkeeper.api.formats.openai import LlamaReading, OpenAiReading
from slotkeeper.api.formats.responses import ResponsesReading
from slotkeeper.api.head import Api

# -- server-sent events from chunks that may be cut anywhere (WHATWG rules) ------------------------------
# Lines are cut with `split`, never byte by byte, and the pieces of a line are joined once: cost is linear.

LIMIT_BYTES: Final = 16 * 2**20  # a final native event echoes its prompt: 131072 tokens stay below 1 MiB
_BOM: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One event; `name` is "" if the stream gave none."""

    name: str
    data: bytes


def comment(*lines: str) -> bytes:
    """Return SSE comment lines, which every client skips; the empty line after them ends no event."""
    return b"".join(b": " + line.encode() + b"\n" for line in lines) + b"\n"


@dataclass(slots=True, eq=False)
class SseSplitter:
    """Collects the chunks of a stream and returns the events that they complete.

    An event of more than `limit` bytes is dropped.
    """

    _: KW_ONLY
    limit: int = LIMIT_BYTES
    _partial: list[bytes] = field(default_factory=list)  # pieces of the line that is not complete
    _data: list[bytes] = field(default_factory=list)
    _name: str = ""
    _size: int = 0  # bytes of the event so far, its partial line included
    _dropping: bool = False
    _after_cr: bool = False
    _first: bool = True

    def __repr__(self) -> str:
        state = "dropping" if self._dropping else f"{len(self._data)} data lines"
        return f"<SseSplitter {self._size} of {self.limit} bytes, {state}>"

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Return the events that end within `chunk`."""
        if self._after_cr and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._after_cr = False
        if b"\r" in chunk:
            # A CR ends its line at once; an LF at the start of the next chunk belongs to that CR.
            self._after_cr = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *ended, rest = chunk.split(b"\n")
        events: list[SseEvent] = []
        for piece in ended:
            self._keep(piece)
            line = b"".join(self._partial)
            self._partial = []
            self._line(line, events)
        if rest:
            self._keep(rest)
        return events

    def close(self) -> list[SseEvent]:
        """Return the last event if the stream ended without the empty line that ends an event."""
        events = self.feed(b"\n\n") if self._partial or self._data else []
        self._reset()
        return events

    def _keep(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size > self.limit:
            self._dropping = True
            self._data = []
            # The rest of the line must not look like the empty line that ends an event.
            self._partial = [b":"] if piece or self._partial else []
        elif piece:
            self._partial.append(piece)

    def _line(self, line: bytes, events: list[SseEvent]) -> None:
        if self._first:
            line = line.removeprefix(_BOM)
            self._first = False
        if not line:
            if self._data and not self._dropping:
                events.append(SseEvent(self._name, b"\n".join(self._data)))
            self._reset()
            return
        field, _, value = line.partition(b":")
        if field == b"data" and not self._dropping:
            self._data.append(value.removeprefix(b" "))
        elif field == b"event":
            self._name = value.removeprefix(b" ").decode("utf-8", "replace")

    def _reset(self) -> None:
        self._partial = []
        self._data = []
        self._name = ""
        self._size = 0
        self._dropping = False


# -- progress of the prefill, removed from the stream ----------------------------------------------------
# The engine notices that a client has left only when it writes to that client, and it writes nothing during a
# prefill (engine.md T10): it computes a prompt of 60,000 tokens to the end for no client, and the slot is
# busy for minutes. With `return_progress` (api/request.py) the engine writes an event after each batch. The
# client did not ask for these events and does not see them; all other bytes pass unchanged.

MARK: Final = b'"prompt_progress":{'  # inside a JSON string it would be escaped: \"prompt_progress\"
END: Final = b"\n\n"
LONGEST: Final = 16 * 1024  # bytes of an event that may be a progress event: real ones have a few hundred


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a prefill is, in tokens of the prompt."""

    total: int
    reused: int  # tokens that the slot had before the prefill began
    processed: int  # tokens done so far, the reused ones included
    seconds: float  # since the prefill began


@dataclass(slots=True, eq=False)
class ProgressFilter:
    """Removes the progress events from one stream. They all come before the first other event."""

    latest: Progress | None = None
    _held: bytes = b""
    _finished: bool = False

    def feed(self, chunk: bytes) -> bytes:
        """Return the bytes that may go to the client. At most one incomplete event is held back."""
        if self._finished:
            return chunk
        self._held += chunk
        out = []
        while not self._finished:
            event, end, rest = self._held.partition(END)
            if not end:
                self._finished = len(self._held) > LONGEST
                break
            self._held = rest
            if MARK in event:
                self.latest = read_progress(event) or self.latest
            else:
                out.append(event + end)
                self._finished = not event.startswith(b":")  # a ping does not show that the prefill is over
        if self._finished:
            out.append(self._held)
            self._held = b""
        return b"".join(out)

    def close(self) -> bytes:
        """Return the bytes still held back when the stream ended before its first other event."""
        held, self._held = self._held, b""
        return held


def read_progress(event: bytes) -> Progress | None:
    """Parse a progress event; None if it does not have the known shape."""
    try:
        doc: Any = orjson.loads(event[event.index(b"{") :])["prompt_progress"]
        total, reused, processed = (int(doc[name]) for name in ("total", "cache", "processed"))
        return Progress(total, reused, processed, float(doc.get("time_ms", 0)) / 1000)
    except (ValueError, KeyError, TypeError):
        return None


# The first event of each route that has progress events, as the engine writes it before it has any text.
_SILENT_EVENTS: Final[Mapping[Api, Mapping[str, Any]]] = MappingProxyType(
    {
        Api.CHAT: {
            "choices": [{"finish_reason": None, "index": 0, "delta": {"role": "assistant", "content": None}}],
            "object": "chat.completion.chunk",
        },
        Api.COMPLETIONS: {
            "choices": [{"text": "", "index": 0, "logprobs": None, "finish_reason": None}],
            "object": "text_completion",
        },
        Api.COMPLETION: {"index": 0, "content": "", "tokens": [], "stop": False, "id_slot": -1},
    }
)


def waiting_event(
    api: Api, request_id: str, created: int, now: Mapping[str, Any], progress: Progress | None
) -> bytes | None:
    """Return an event for a client that asked for progress and whose request has no event of the engine yet.

    It has the shape of the engine's own, and under `slotkeeper` what the request waits for. `created`:
    seconds since 1970. `progress` is None while it is not known what is to be computed. None for a route
    without such events.
    """
    silent = _SILENT_EVENTS.get(api)
    if silent is None:
        return None
    doc: dict[str, Any] = {**silent, "slotkeeper": now}
    if api is not Api.COMPLETION:
        doc |= {"id": f"chatcmpl-{request_id}", "created": created, "model": ""}
    if progress is not None:
        doc["prompt_progress"] = {
            "total": progress.total,
            "cache": progress.reused,
            "processed": progress.processed,
            "time_ms": round(1000 * progress.seconds),
        }
    return b"data: " + orjson.dumps(doc) + END


# -- the content of an answer: the engine's figures and the assistant's message --------------------------

BODY_LIMIT_BYTES: Final = 64 * 2**20  # a native answer echoes its prompt; token probabilities add far more
_UNREADABLE: Final = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The parts of an answer that could be read."""

    figures: Figures
    reply: Doc | None  # the assistant's message as the client will send it back, in OpenAI's chat shape
    complete: bool  # the answer has the end that its API prescribes
    error: str | None  # the type of the error in the answer, never its text

    @property
    def calls_tools(self) -> bool | None:
        """Whether it asks for tools; None: it broke off or was not read."""
        return "tool_calls" in self.reply if self.complete and self.reply is not None else None


class AnswerReading(Protocol):
    """Reads the answers of one API into an `AnswerBuilder`."""

    def event(self, name: str, data: bytes) -> None:
        """Read one event of a stream."""

    def body(self, doc: Any) -> None:
        """Read a whole answer."""


READINGS: Final[Mapping[Api, Callable[[AnswerBuilder], AnswerReading]]] = {
    Api.CHAT: OpenAiReading,
    Api.COMPLETIONS: OpenAiReading,
    Api.MESSAGES: AnthropicReading,
    Api.RESPONSES: ResponsesReading,
    Api.COMPLETION: LlamaReading,
    Api.INFILL: LlamaReading,
}


class AnswerReader:
    """Reads the uncompressed bytes of one answer, in chunks of any size."""

    __slots__ = ("_body", "_body_bytes", "_draft", "_reading", "_splitter", "_status", "events")

    def __init__(self, api: Api, *, stream: bool, status: int = 200) -> None:
        self._draft = AnswerBuilder()
        self._reading = READINGS.get(api, OpenAiReading)(self._draft)
        # An error is plain JSON even if the client asked for a stream (engine.md 7).
        self._splitter = SseSplitter() if stream and status < 400 else None
        self._status = status
        self._body: list[bytes] = []
        self._body_bytes = 0
        self.events = 0  # events read from the stream

    def __repr__(self) -> str:
        form = "stream" if self._splitter else f"body of {self._body_bytes} bytes"
        return f"<AnswerReader {self._reading.__class__.__name__} {form}, {self._draft!r}>"

    def feed(self, chunk: bytes) -> None:
        """Read the next bytes."""
        if self._splitter is not None:
            for event in self._splitter.feed(chunk):
                self._event(event)
            return
        self._body_bytes += len(chunk)
        if self._body_bytes > BODY_LIMIT_BYTES:
            self._body = []
        elif chunk:
            self._body.append(chunk)
            self._draft.spoke = self._draft.spoke or self._status < 400

    def broke_off(self, *, delimited: bool) -> bool:
        """Whether an answer whose bytes have all come lacks its end.

        The end of a stream is its last event: `[DONE]`, `message_stop`, `response.completed`, the chunk with
        `stop`, or an error. A body that is `delimited`, by a length or by chunks, is complete. Else the end
        of the connection ended it, and it must be JSON.
        """
        answer = self.close()
        if self._splitter is None and (
            delimited or not self._body_bytes or self._body_bytes > BODY_LIMIT_BYTES
        ):
            return False
        return self._status < 400 and not answer.complete and answer.error is None

    def first_token(self) -> bool:
        """Whether generated content has come: the role alone, pings and prompt progress do not count."""
        return self._draft.spoke

    def close(self) -> Answer:
        """Read the last event or the whole body, and return the answer."""
        if self._splitter is not None:
            for event in self._splitter.close():
                self._event(event)
        elif self._body:
            self._whole(b"".join(self._body))
            self._body = []
        draft = self._draft
        if self._status >= 400 and draft.error is None:
            draft.error = str(self._status)
        return Answer(
            figures=draft.figures(),
            reply=draft.reply() if draft.error is None else None,
            complete=draft.complete,
            error=draft.error,
        )

    def _event(self, event: SseEvent) -> None:
        self.events += 1
        try:
            self._reading.event(event.name, event.data)
        except _UNREADABLE:
            self._draft.unread += 1

    def _whole(self, body: bytes) -> None:
        try:
            doc = orjson.loads(body)
            self._draft.complete = True
            if not self._draft.failed(doc):
                self._reading.body(doc)
        except _UNREADABLE:
            self._draft.unread += 1


# -- how long a client waited ---------------------------------------------------------------------------

# How long clients wait for the tokens of answers. All such figures are defined here.
#
# For one answer: the time to its first token, and its longest stall, which is the longest time between two
# events of its stream from the first token on. Of many answers: the sum of the times to a first token,
# their 50th and 95th percentiles, and the longest stall. Metrics, dashboard, `why`, `top`, log, `replay`,
# `demo` and benchmarks read these figures and compute none.
#
# The least that a client can wait for a first token is the time in which its engine computes the tokens that
# any cache must compute, in one pass and without a queue: `least_seconds`. `PrefillTimes` says how long that
# takes. Waits are compared with it only over requests for which both are known.


@dataclass(slots=True, eq=False)
class TokenTimes:
    """When the tokens of one answer came, in seconds on the clock of `read`."""

    first: float | None = None  # when the first token came; None: none has
    stall: float | None = None  # the longest stall; None: fewer than two events, or no stream
    _last: float = 0.0
    _events: int = 0

    def read(self, reader: AnswerReader, clock: Callable[[], float]) -> bool:
        """Take the time, if the chunk that `reader` has just read ended an event.

        Returns whether a figure has changed, which few of the chunks do.

        An answer that is no stream has a first token, which is its first byte, and no stall.
        """
        events = reader.events
        if self.first is None:
            if not reader.first_token():
                return False
            self._events, self.first = events, clock()
            self._last = self.first
            return True
        if events == self._events:  # a part of an event, or a comment
            return False
        now = clock()
        gap, self._last, self._events = now - self._last, now, events
        if self.stall is not None and gap <= self.stall:
            return False
        self.stall = gap
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """The figures of many answers, in seconds; None without any."""

    answers: int  # whose first token came
    waited_seconds: float  # the sum of their times to a first token
    first_token_p50: float | None
    first_token_p95: float | None
    stall_seconds: float | None  # the longest stall of one answer
    compared: int  # answers whose least wait is known
    compared_seconds: float | None  # the sum of their times to a first token
    least_seconds: float | None  # the sum of their least waits

    def shown(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return {n: round(v, 6) if isinstance(v, float) else v for n, v in asdict(self).items()}


class Waited(NamedTuple):
    """The figures of one answer, in seconds; None: unknown."""

    first_token: float | None
    stall: float | None
    least: float | None  # the least time to its first token


def waits(answers: Iterable[Waited]) -> Waits:
    """Sum up answers."""
    found = tuple(answers)
    first = [one.first_token for one in found if one.first_token is not None]
    compared = [
        (one.first_token, one.least) for one in found if one.first_token is not None and one.least is not None
    ]
    return Waits(
        answers=len(first),
        waited_seconds=sum(first),
        first_token_p50=percentile(first, 50),
        first_token_p95=percentile(first, 95),
        stall_seconds=max((one.stall for one in found if one.stall is not None), default=None),
        compared=len(compared),
        compared_seconds=sum(waited for waited, _ in compared) if compared else None,
        least_seconds=sum(least for _, least in compared) if compared else None,
    )


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Return the smallest value that `percent` % of the values do not exceed; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    rank = -(-len(ordered) * percent // 100)  # rounded up
    return ordered[max(0, int(rank) - 1)]


# -- the least that a client can wait --------------------------------------------------------------------

UBATCH_TOKENS: Final = 512  # tokens of a stock engine's ubatch, for which prefill rates are reported
MEASURED: Final = 6  # prefills that are needed to fit three figures to them
UNLIKE: Final = 2.0  # the longest must have this many times the tokens of the shortest
ROUNDS: Final = 30  # of weighting: each lessens the weight of prefills that took unusually long
NOISE: Final = 0.01  # relative: no prefill counts as better fitted than this
EQUAL: Final = 1e-9  # relative: what is left of a diagonal if two columns tell the same
REMEMBERED: Final = 32  # last prefills of an engine, from which its times follow
NEW_SHARE: Final = 0.25  # of them, after which they are fitted again: a fit takes milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """One prefill, by its engine's own figures."""

    tokens: int  # that were computed
    context: int  # tokens in front of them
    seconds: float

    @property
    def depths(self) -> float:
        """The tokens in front of each computed token, summed up."""
        return _depths(self.tokens, self.context)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTimes:
    """How long one engine takes for a prefill."""

    pass_seconds: float  # for any number of tokens: a pass through the model, which reads all weights
    token_seconds: float  # for each token
    depth_seconds: float  # for each token, and for each token of context in front of it

    def seconds(self, tokens: int, context: int) -> float:
        """Return the time to compute `tokens` behind `context` others."""
        return self.pass_seconds + tokens * self.token_seconds + _depths(tokens, context) * self.depth_seconds


def prefill_times(prefills: Iterable[Prefilled]) -> PrefillTimes | None:
    """Fit the times of an engine to prefills of it; None if these are too few or too much alike.

    Least absolute relative errors, so that a few prefills beside other work have no effect.
    """
    found = [one for one in prefills if one.tokens > 0 and one.seconds > 0]
    tokens = [one.tokens for one in found]
    if len(found) < MEASURED or max(tokens) < UNLIKE * min(tokens):
        return None
    rows = [(1.0, float(one.tokens), one.depths) for one in found]
    times = [one.seconds for one in found]
    # No part may be negative: if one is, the prefills do not show it, and it is left out.
    for parts in ((0, 1, 2), (0, 1), (1, 2), (1,)):
        fitted = _least_errors([[row[part] for part in parts] for row in rows], times)
        if fitted and min(fitted) >= 0:
            each = dict(zip(parts, fitted, strict=True))
            return PrefillTimes(
                pass_seconds=each.get(0, 0.0), token_seconds=each[1], depth_seconds=each.get(2, 0.0)
            )
    return None


@dataclass(slots=True, eq=False)
class EngineSpeed:
    """How long an engine takes for a prefill, by its last ones."""

    times: PrefillTimes | None = None  # None: its prefills have not told them yet
    _seen: deque[Prefilled] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _new: int = 0  # of `_seen`, since the last fit

    def took(self, prefill: Prefilled) -> None:
        """Take in a prefill that ran beside no other request. Times that new ones do not tell stay."""
        self._seen.append(prefill)
        self._new += 1
        if self._new >= NEW_SHARE * len(self._seen):
            self.times, self._new = prefill_times(self._seen) or self.times, 0


def least_seconds(times: PrefillTimes | None, oracle: int | None, prompt: int) -> float | None:
    """Return the least time to the first token of a prompt, of which `oracle` tokens must be computed.

    None: the engine's times or the oracle are unknown.
    """
    return None if times is None or oracle is None else times.seconds(oracle, prompt - oracle)


def _depths(tokens: int, context: int) -> float:
    return tokens * context + tokens * (tokens - 1) / 2


def _least_errors(rows: Sequence[Sequence[float]], times: Sequence[float]) -> list[float] | None:
    """Return the factors with the least sum of relative errors; None if the rows do not decide them."""
    scaled = [[value / time for value in row] for row, time in zip(rows, times, strict=True)]
    weights = [1.0] * len(scaled)
    factors: list[float] | None = None
    for _ in range(ROUNDS):
        factors = _least_squares(scaled, weights)
        if factors is None:
            return None
        predicted = [sum(map(mul, factors, row)) for row in scaled]
        weights = [1 / max(NOISE, abs(1 - one)) for one in predicted]
    return factors


def _least_squares(rows: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float] | None:
    """Return the factors that make each row closest to 1; None if the rows do not decide them."""
    size = range(len(rows[0]))
    matrix = [
        [
            *(sum(w * row[i] * row[j] for row, w in zip(rows, weights, strict=True)) for j in size),
            sum(w * row[i] for row, w in zip(rows, weights, strict=True)),
        ]
        for i in size
    ]
    whole = [matrix[i][i] for i in size]
    for i in size:  # elimination; the matrix is positive definite, so no rows need to be exchanged
        if matrix[i][i] <= EQUAL * whole[i]:
            return None
        for j in size:
            if j != i:
                share = matrix[j][i] / matrix[i][i]
                matrix[j] = [a - share * b for a, b in zip(matrix[j], matrix[i], strict=True)]
    return [matrix[i][-1] / matrix[i][i] for i in size]
