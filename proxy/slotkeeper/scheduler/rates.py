"""What is known of how fast one engine is, how much work it has, and whether requests fail there.

Rates and estimates come from the engine's own figures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import combinations
from math import inf, log2
from statistics import geometric_mean, median, median_low, quantiles
from typing import Final

from slotkeeper.scheduler.types import RequestId

SHARE: Final = 0.3  # weight of a new measurement in the running mean
LEAST_TOKENS: Final = 64  # the time of a shorter prefill is mostly the round trip
LEAST_REPLY: Final = 8  # tokens: the time of a shorter answer is mostly the round trip
LEAST_BYTES: Final = 64 * 1024
LARGE_BYTES: Final = 64 * 1024 * 1024  # setup and other short delays hardly matter in the time of such a file
# To and from the RAM cache, until it was measured: that of an H200 through Vulkan (profile `h200-8b` in
# benchmarks/engine_profiles.py), where to copy a state takes as long as to compute it. Memory that host and
# device share may do ten times as much (ggml-org/llama.cpp#22929, its log: 149.6 MiB in 13 ms).
COPY_BYTES_PER_SECOND: Final = 1.2e9
LEAST_COPY_BYTES: Final = 16 * 1024 * 1024  # the time of a smaller copy is mostly the round trip
DEFAULT_TOKEN_BYTES: Final = 65536.0  # of a state, while neither a header nor a file tells them
CALL_SECONDS: Final = 0.004  # for a slot action, besides its bytes: a round trip and a look at the file
REMEMBERED: Final = 15  # measurements kept
UNLIKE: Final = 1.25  # the larger of two files must be this many times as large to separate the two times
PAIRS: Final = 3  # pairs of such files that are needed to separate the two times
PREFILL_TOKENS_PER_SECOND: Final = 1000.0  # at most, until it was measured
# Of the state that a prefill makes. The cards of the engine profiles (benchmarks/engine_profiles.py) make 129
# to 274 MB each second, a CPU and an APU 7 to 38.
PREFILL_STATE_BYTES_PER_SECOND: Final = 1.6e8
MEASURED: Final = 3  # measurements needed before an engine's speed is compared with another's
NEARLY_EQUAL: Final = (
    1e-3  # files of more similar form do not tell the bytes of tokens and of checkpoints apart
)
WORTH_A_FILE: Final = 256  # tokens: a shorter state is faster to compute than to restore
LEAST_PATIENCE: Final = 1.0  # seconds: a shorter wait depends more on chance than on the cold tier


@dataclass(slots=True)
class LinearTimes:
    """The time of an operation on a number of bytes or tokens: a constant part, and a part for each of them.

    Both are medians of the last measurements and of our guess. So neither a slow first file, which needs more
    setup, nor one that was held up by other load decides the estimate. A first one that is slower than the
    guess counts as much as that (their geometric mean), a quicker one alone. If the first is large, the guess
    no longer counts.
    """

    guess: float  # bytes or tokens per second, until something was measured
    least: int = LEAST_BYTES  # smaller operations are not measured
    call_seconds: float = CALL_SECONDS
    _seen: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    separated: bool = False  # whether measurements have told the constant part and the other one apart
    constant: float = 0.0  # seconds for any size, besides the call
    each: float = field(init=False)  # seconds for each byte or token

    def __post_init__(self) -> None:
        self.each = 1 / self.guess

    @property
    def measured(self) -> bool:
        return bool(self._seen)

    def seconds(self, size: int) -> float:
        return self.call_seconds + self.constant + size * self.each

    def took(self, size: int, seconds: float) -> None:
        if seconds <= 0 or size < self.least:
            return
        self._seen.append((size, seconds))
        pairs = combinations(sorted(self._seen), 2)
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs if b[0] >= UNLIKE * a[0]]
        self.separated = len(slopes) >= PAIRS
        if self.separated:
            self.each = max(0.0, median(slopes))
            self.constant = max(0.0, median(time - self.each * size for size, time in self._seen))
        else:
            guess, found = 1 / self.guess, [time / size for size, time in self._seen]
            if self._seen[0][0] >= LARGE_BYTES:
                self.each = median_low(found)
            elif len(found) > 1:
                self.each = median_low([guess, *found])
            else:
                self.each = min(found[0], geometric_mean([guess, found[0]]))
            self.constant = 0.0


@dataclass(slots=True)
class Measured:
    """A figure of an engine that varies: its running mean, and the last measurements of it."""

    mean: float  # our guess, until something was measured
    measured: bool = False
    # Of the last measurements. The quartiles are known once these are enough (`comparable`).
    low: float = 0.0
    middle: float = 0.0
    high: float = 0.0
    most: float = 0.0
    _seen: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    @property
    def comparable(self) -> bool:
        """Whether there are enough measurements. A single one may come from a moment of other load."""
        return len(self._seen) >= MEASURED

    @property
    def shown(self) -> float | None:
        """The mean for observers; None before the first measurement."""
        return self.mean if self.measured else None

    def was(self, value: float) -> None:
        self.mean = self.mean + SHARE * (value - self.mean) if self.measured else value
        self.measured = True
        self._seen.append(value)
        self.most = max(self._seen)
        if self.comparable:
            self.low, self.middle, self.high = quantiles(self._seen, n=4, method="inclusive")


@dataclass(slots=True)
class StateSize:
    """The bytes of a state, fitted to the files that an engine wrote.

    Each token counts, and a constant for the state itself and for each checkpoint (recurrent layers, window).
    Before the first file, both come from the model's header. While all files have the same form, these are
    scaled to them.

    An entry of the engine's RAM cache is as large as a file with the same checkpoints (engine.md 4).
    """

    token_bytes: float = DEFAULT_TOKEN_BYTES  # by the header
    constant_bytes: float = 0.0  # of a checkpoint, by the header
    told: bool = False  # whether the header told it
    seen: bool = False  # whether a file was measured
    tokens_squared: float = 0.0  # sums over all files, of products
    mixed: float = 0.0  # tokens x constants
    constants_squared: float = 0.0
    tokens_bytes: float = 0.0
    constants_bytes: float = 0.0
    told_squared: float = 0.0  # of the sizes by the header
    told_bytes: float = 0.0

    def take_header(self, token_bytes: int, checkpoint_bytes: int) -> None:
        """Take over the sizes from the model's header, in bytes; 0 bytes for a token: unknown."""
        if token_bytes and not self.seen:
            self.token_bytes, self.constant_bytes = float(token_bytes), float(checkpoint_bytes)
            self.told = True

    def saw(self, tokens: int, checkpoints: int, size: int) -> None:
        """Take in a file of `size` bytes."""
        constants = 1 + checkpoints
        told = self.token_bytes * tokens + self.constant_bytes * constants
        self.tokens_squared += tokens * tokens
        self.mixed += tokens * constants
        self.constants_squared += constants * constants
        self.tokens_bytes += tokens * size
        self.constants_bytes += constants * size
        self.told_squared += told * told
        self.told_bytes += told * size
        self.seen = True

    @property
    def known(self) -> bool:
        """Whether the sizes are more than a guess."""
        return self.told or self.seen

    def of(self, tokens: int, checkpoints: int) -> int:
        """Return the estimated bytes of a state."""
        each, constant = self.fitted
        return int(each * tokens + constant * (1 + checkpoints))

    def of_all(self, states: Iterable[tuple[int, int]]) -> list[int]:
        """Return the estimated bytes of each of these states, given as tokens and checkpoints."""
        each, constant = self.fitted
        return [int(each * tokens + constant * (1 + checkpoints)) for tokens, checkpoints in states]

    @property
    def fitted(self) -> tuple[float, float]:
        """The bytes of each token and of each constant: least squares, none of them negative."""
        whole = self.tokens_squared * self.constants_squared
        different = whole - self.mixed**2
        if different > whole * NEARLY_EQUAL:
            each = self.tokens_bytes * self.constants_squared - self.constants_bytes * self.mixed
            constant = self.constants_bytes * self.tokens_squared - self.tokens_bytes * self.mixed
            if each >= 0 and constant >= 0:
                return each / different, constant / different
        scale = self.told_bytes / self.told_squared if self.told_squared else 1.0
        return self.token_bytes * scale, self.constant_bytes * scale


@dataclass(slots=True)
class Rates:
    """The measured rates of one engine. Prices are in tokens of prefill that it could compute in the time.

    The values before the first measurement are those of a small model on a good machine with a disk; the
    header of a larger model makes its prefill slower (`take_header`).
    """

    prefill: Measured = field(default_factory=lambda: Measured(PREFILL_TOKENS_PER_SECOND))
    # Of a prefill: the constant part is the time of a pass through the model, which reads all weights.
    prefilling: LinearTimes = field(
        default_factory=lambda: LinearTimes(PREFILL_TOKENS_PER_SECOND, least=1, call_seconds=0.0)
    )
    reading: LinearTimes = field(default_factory=lambda: LinearTimes(1e9))  # of a restore
    writing: LinearTimes = field(default_factory=lambda: LinearTimes(5e8))  # of a save
    # To and from the engine's RAM cache, before a task begins.
    copying: LinearTimes = field(
        default_factory=lambda: LinearTimes(COPY_BYTES_PER_SECOND, least=LEAST_COPY_BYTES, call_seconds=0.0)
    )
    # Tokens per second of one answer, while others run beside it.
    decode: Measured = field(default_factory=lambda: Measured(50.0))
    reply: Measured = field(default_factory=lambda: Measured(200.0))  # tokens of an answer
    bringing: LinearTimes = field(default_factory=lambda: LinearTimes(2e8))  # from cold tier to hot tier
    # Seconds for which the engine worked for no client, until a request of any of them began.
    rests: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    @property
    def pass_seconds(self) -> float:
        """The time of a pass through the model, whatever few tokens it computes; 0.0 until it is known.

        A token of an answer takes at least one pass, unless a draft model foretells several.
        """
        return max(self.prefilling.constant, 1 / self.decode.mean if self.decode.measured else 0.0)

    def beyond_a_pass(self, tokens: int) -> float:
        """Return the seconds by which a prefill of these tokens takes longer than a pass."""
        return tokens * self.prefilling.each

    @property
    def marginal_prefill(self) -> float:
        """Tokens per second by which a prefill may be longer; prices count in tokens of this rate.

        Short prefills, which take a pass each, and those beside other work are slower: by their rate a file
        would look cheaper than the few tokens that it saves. It is the slope of the fitted time as soon as
        that is known, but no more than the rate of the fastest of the last prefills.

        That tokens get dearer with their context is left out: with the true growth of each simulated engine,
        `benchmarks.profiles` shows 1.001 times the seconds and 1.004 times the tokens.
        """
        slope = self.prefilling.each if self.prefilling.separated else 0.0
        return min(1 / slope if slope else inf, self.prefill.most or self.prefill.mean)

    def take_header(self, token_bytes: int) -> None:
        """Take over the size of a token's state from the model's header, in bytes; 0: unknown.

        It grows with the model, so the guess for a prefill falls with it.
        """
        if token_bytes and not self.prefilling.measured:
            guess = min(PREFILL_TOKENS_PER_SECOND, PREFILL_STATE_BYTES_PER_SECOND / token_bytes)
            self.prefill.mean, self.prefilling.guess, self.prefilling.each = guess, guess, 1 / guess

    def prefilled(self, tokens: int, seconds: float | None) -> None:
        if seconds:
            self.prefilling.took(tokens, seconds)
        if seconds and tokens >= LEAST_TOKENS:
            self.prefill.was(tokens / seconds)

    def replied(self, tokens: int, seconds: float) -> None:
        """Record how long an answer of this many tokens took after its prompt was computed."""
        if tokens >= LEAST_REPLY and seconds > 0:
            self.decode.was(tokens / seconds)
        if tokens:
            self.reply.was(float(tokens))

    def copied(self, size: int, seconds: float, *, held_up: float = 0.0) -> None:
        """Record how long the engine copied so many bytes to and from its RAM cache.

        `held_up`: other work may have taken that many of the seconds. Within these bounds our estimate
        stands.
        """
        expected, least = self.copying.seconds(size), seconds - held_up
        if self.copying.measured or not least < expected < seconds:
            self.copying.took(size, min(max(expected, least), seconds))

    def restored(self, size: int, seconds: float) -> None:
        self.reading.took(size, seconds)

    def brought(self, size: int, seconds: float) -> None:
        """Record a copy from the cold tier to the hot one; 0 seconds: it was in the hot tier already."""
        self.bringing.took(size, seconds)

    def saved(self, size: int, seconds: float) -> None:
        """Record a save of so many bytes that the engine wrote."""
        self.writing.took(size, seconds)

    def save_price(self, size: int) -> float:
        return self.writing.seconds(size) * self.marginal_prefill

    def copy_seconds(self, size: int) -> float:
        return self.copying.seconds(size) if size else 0.0

    def copy_price(self, size: int) -> float:
        """Return the price of copying so many bytes to or from the engine's RAM cache."""
        return self.copy_seconds(size) * self.marginal_prefill

    def restore_price(self, size: int, *, cold: bool = False) -> float:
        seconds = self.reading.seconds(size) + (self.bringing.seconds(size) if cold else 0.0)
        return seconds * self.marginal_prefill

    def bring_within(self, tokens: int) -> float:
        """Return after how many seconds to give up a copy from the cold tier: the time to compute the state.

        So neither a slow store nor a slow engine can cost more than twice the faster of the two.
        """
        return max(LEAST_PATIENCE, tokens / self.prefill.mean)


# -- work: what an engine has begun for clients, and when it should be finished ---------------------------

SHORTEST: Final = 0.01  # seconds: no estimate is shorter


@dataclass(frozen=True, slots=True)
class Expected:
    """Something that is expected to take this many seconds."""

    since: float
    seconds: float

    def left(self, now: float) -> float:
        """Return the expected remaining seconds.

        What has exceeded its estimate is expected to take as long again.
        """
        passed = now - self.since
        return self.seconds - passed if passed < self.seconds else passed

    def overdue(self, now: float) -> int:
        """Return 0 within the estimate, then 1, and one more each time the elapsed time doubles."""
        passed = now - self.since
        return 0 if passed < self.seconds else 1 + int(log2(passed / self.seconds))

    def overdue_at(self, now: float) -> float:
        """Return when `overdue` will next increase."""
        return float(self.since + self.seconds * 2 ** self.overdue(now))


@dataclass(frozen=True, slots=True)
class Served(Expected):
    """One request in an engine."""

    prefilled_at: float = 0.0  # when its prompt should have been computed


@dataclass(slots=True)
class EngineWork:
    """The requests that an engine has begun. It computes their prompts one after the other, oldest first."""

    served: dict[RequestId, Served] = field(default_factory=dict)
    awaiting: int = 0  # requests that wait for one of its slots although other engines have free ones

    def begins(self, request: RequestId, now: float, *, prefill: float, reply: float) -> None:
        """Record a request. `prefill` and `reply`: estimated seconds for its prompt and its answer."""
        self.served.pop(request, None)
        prefilled_at = now + self.ahead(now) + prefill
        self.served[request] = Served(now, max(SHORTEST, prefilled_at - now + reply), prefilled_at)

    def ends(self, request: RequestId) -> None:
        self.served.pop(request, None)

    def ahead(self, now: float, but: Collection[RequestId] = ()) -> float:
        """Seconds of prefill that a new request finds ahead of its own, or beside those of these requests."""
        until = (one.prefilled_at for request, one in self.served.items() if request not in but)
        return max(0.0, max(until, default=now) - now)

    def free_in(self, now: float) -> float | None:
        """Seconds until a slot is free beyond those that requests wait for; None if that is unknown."""
        left = sorted(one.left(now) for one in self.served.values())
        return left[self.awaiting] if self.awaiting < len(left) else None

    def overdue(self, now: float) -> int:
        """A number that changes when requests that wait for this engine need a new decision."""
        return sum(one.overdue(now) for one in self.served.values())

    def overdue_at(self, now: float) -> float:
        """When that number will change; infinite if no request waits for this engine."""
        if not self.awaiting:
            return inf
        return min((one.overdue_at(now) for one in self.served.values()), default=inf)


# -- the circuit breaker: requests fail on an engine although it answers /health --------------------------
# It has an effect only while another engine of the model can be used. The only engine always gets the
# requests.

TRIPS: Final = 3  # errors of the engine in a row: one error may be the request's own fault
FIRST_REST: Final = 1.0  # seconds until the engine is tried again; doubled with each further failure
LONGEST_REST: Final = 60.0  # seconds


@dataclass(slots=True)
class Breaker:
    failures: int = 0  # in a row
    until: float = -inf  # when the engine is tried again
    resting: bool = False  # whether that time is still to come

    def failed(self, now: float, *, broken: bool) -> None:
        """Record a failed request. `broken`: it got no answer, so no other request follows at once."""
        self.failures += 1
        if broken or self.failures >= TRIPS:
            self.until = now + min(LONGEST_REST, FIRST_REST * 2 ** min(max(0, self.failures - TRIPS), 16))
            self.resting = True

    def worked(self) -> None:
        self.failures, self.until, self.resting = 0, -inf, False

    def rested(self, now: float) -> bool:
        """Whether the engine may be tried again from now on: its waiting time has just ended."""
        over = self.resting and now >= self.until
        self.resting = self.resting and not over
        return over

    def on_trial(self, *, busy: bool) -> bool:
        """Whether the engine is being tried with one request at a time, and that one is running."""
        return self.failures >= TRIPS and busy
