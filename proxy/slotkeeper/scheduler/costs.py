"""What time and room cost: rates learned from an engine's own figures, and the limits that a user has set."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import combinations
from math import inf
from statistics import median, median_low, quantiles
from typing import Final

SHARE: Final = 0.3  # of a new measurement in the running mean
LEAST_TOKENS: Final = 64  # a shorter prefill measures the round trip
LEAST_REPLY: Final = 8  # tokens: a shorter answer measures the round trip
LEAST_BYTES: Final = 64 * 1024
CALL_SECONDS: Final = 0.004  # of a slot action beside its bytes: a round trip and a look at the file
REMEMBERED: Final = 15  # files of which it is known how long they took
UNLIKE: Final = 1.25  # so many times as large a file tells the time for each byte from the constant one
PAIRS: Final = 3  # of such files, below which they do not
MEASURED: Final = 3  # times, until an engine's speed is compared with that of another
LEAST_PATIENCE: Final = 1.0  # seconds: less says more about this moment than about the cold tier


@dataclass(slots=True)
class FileTimes:
    """How long the engine takes to write or to read a file: a constant time, and one for each byte.

    Both are medians of the last measurements, with our guess among them: neither the first file, which has
    more to set up, nor one in which the machine was held up, says what the next will cost.
    """

    guess: float  # bytes a second, as long as nothing was measured
    _seen: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _constant: float = 0.0
    _each: float = field(init=False)

    def __post_init__(self) -> None:
        self._each = 1 / self.guess

    def seconds(self, size: int) -> float:
        return CALL_SECONDS + self._constant + size * self._each

    def took(self, size: int, seconds: float) -> None:
        if seconds <= 0 or size < LEAST_BYTES:
            return
        self._seen.append((size, seconds))
        pairs = [sorted(pair) for pair in combinations(self._seen, 2)]
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs if b[0] >= UNLIKE * a[0]]
        if len(slopes) >= PAIRS:
            self._each = max(0.0, median(slopes))
            self._constant = max(0.0, median(one - self._each * bytes_ for bytes_, one in self._seen))
        else:
            self._each = median_low([1 / self.guess, *(one / bytes_ for bytes_, one in self._seen)])
            self._constant = 0.0


@dataclass(slots=True)
class Speed:
    """Tokens a second, as the last measurements have it: the middle half of them."""

    _seen: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    low: float = 0.0
    middle: float = 0.0
    high: float = 0.0

    @property
    def known(self) -> bool:
        """Whether there are enough of them: one may be of a moment in which the machine was held up."""
        return len(self._seen) >= MEASURED

    def was(self, speed: float) -> None:
        self._seen.append(speed)
        if self.known:
            self.low, self.middle, self.high = quantiles(self._seen, n=4, method="inclusive")


@dataclass(slots=True)
class Rates:
    """Prices are in tokens of prefill: what the engine could have computed in that time.

    Before the first measurement: a small model on a good machine, a state of 64 KiB a token, a disk.
    """

    prefill: float = 1000.0  # tokens a second
    reading: FileTimes = field(default_factory=lambda: FileTimes(1e9))  # of a restore
    writing: FileTimes = field(default_factory=lambda: FileTimes(5e8))  # of a save
    decode: float = 50.0  # tokens a second that one answer gets, beside others
    reply: float = 200.0  # tokens of an answer
    prefills: Speed = field(default_factory=Speed)
    decodes: Speed = field(default_factory=Speed)
    bringing: FileTimes = field(default_factory=lambda: FileTimes(2e8))  # from the cold tier to the hot one
    state: float = 65536.0  # bytes a token
    measured: frozenset[str] = frozenset()

    def told(self, token_bytes: int) -> None:
        """How large a token's state is, by the model's header; 0 = not known."""
        if token_bytes and "state" not in self.measured:
            self.state = float(token_bytes)

    def prefilled(self, tokens: int, seconds: float | None) -> None:
        if seconds and tokens >= LEAST_TOKENS:
            self._learn("prefill", tokens / seconds)
            self.prefills.was(tokens / seconds)

    def replied(self, tokens: int, seconds: float) -> None:
        """An answer of so many tokens took so long, once its prompt was computed."""
        if tokens >= LEAST_REPLY and seconds > 0:
            self._learn("decode", tokens / seconds)
            self.decodes.was(tokens / seconds)
        if tokens:
            self._learn("reply", float(tokens))

    @property
    def shown(self) -> float | None:
        """Tokens of prefill a second, as learned; None as long as nothing was measured."""
        return self.prefill if "prefill" in self.measured else None

    def restored(self, size: int, seconds: float) -> None:
        self.reading.took(size, seconds)

    def brought(self, size: int, seconds: float) -> None:
        """From the cold tier to the hot one; 0 seconds: it lay there."""
        self.bringing.took(size, seconds)

    def saved(self, size: int, tokens: int, seconds: float) -> None:
        self.writing.took(size, seconds)
        if tokens:
            self._learn("state", size / tokens)

    def size_of(self, tokens: int) -> int:
        """Bytes that a state of so many tokens will have in a file."""
        return int(tokens * self.state)

    def save_seconds(self, tokens: int) -> float:
        return self.writing.seconds(self.size_of(tokens))

    def save_price(self, tokens: int) -> float:
        return self.save_seconds(tokens) * self.prefill

    def restore_price(self, size: int, *, cold: bool = False) -> float:
        seconds = self.reading.seconds(size) + (self.bringing.seconds(size) if cold else 0.0)
        return seconds * self.prefill

    def bring_within(self, tokens: int) -> float:
        """Seconds after which it is given up to bring a state of so many tokens: computed, it would be there.

        So neither a slow store nor a slow engine can cost more than twice the better of them.
        """
        return max(LEAST_PATIENCE, tokens / self.prefill)

    def _learn(self, name: str, value: float) -> None:
        old = getattr(self, name)
        known = name in self.measured
        setattr(self, name, old + SHARE * (value - old) if known else value)
        self.measured |= {name}


# -- limits ----------------------------------------------------------------------------------------------

HOUR: Final = 3600.0
WORTH_A_FILE: Final = 256  # tokens: a shorter state is computed sooner than restored
GIB: Final = 2**30


@dataclass(frozen=True, slots=True)
class Limits:
    """Set by the user."""

    hot_bytes: int = 16 * GIB
    cold_bytes: int = 0  # 0 = there is no cold tier
    shared_bytes: int | None = None  # that the cold tier keeps to itself, where others use it too
    hourly_bytes: int = 64 * GIB  # that may be written while conversations pause
    pause: float = 0.25  # seconds without a request until a conversation is saved
    engine_wait: float = 60.0  # seconds for which requests wait for an engine that has ended
    idle_tokens: int = 1_000_000  # that may be computed per hour in idle time
    waiting: int = 4000  # queued requests
    waiting_of_one: int = 1000  # of one client
    swap_wait: float = 10.0  # seconds that a request for a model that is not loaded waits for those that are


@dataclass(slots=True)
class HourlyBudget:
    """A budget of idle time, bytes or tokens: an hour's worth at once, then as it comes."""

    hourly: int
    left: float
    at: float

    def wait(self, size: int, now: float) -> float:
        """Seconds until `size` may be spent; infinite if that is more than ever may at once."""
        refill = (now - self.at) * self.hourly / HOUR
        self.left, self.at = min(float(self.hourly), self.left + refill), now
        if size <= self.left:
            return 0.0
        return (size - self.left) * HOUR / self.hourly if size <= self.hourly else inf

    def spend(self, size: int, now: float) -> bool:
        """Whether `size` may be spent now; then it is taken off."""
        if self.wait(size, now):
            return False
        self.left -= size
        return True
