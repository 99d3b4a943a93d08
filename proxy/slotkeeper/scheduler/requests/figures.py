"""The cost of requests in prompt tokens, and why tokens were computed again. All figures are defined here.

Metrics, dashboard, `why`, `top`, log, `replay`, `demo` and benchmarks read these figures and compute none.
For one request, by the engine's own counts:

    prompt = reused + computed
    computed = evaluated by the request itself + planted for it while its client waited
    reused = left by earlier work; `prepared` of it was computed in idle time

A plant counts as work for its request even if the request does not reuse it. `computed` is at most the
prompt's length; tokens beyond that count only as engine work. Engine work is counted by its purpose: client,
plant, idle, probe.

The oracle is the prompt less the longest beginning that it shares with an earlier prompt. The cache lost the
tokens that were computed beyond it; `Loss` says how. If a request's oracle is unknown, its tokens are in
neither side of a ratio, and `Unknown` says why.

A request's own tokens, its plants and its oracle are counted at the same moment: when it has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final

from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import SlotContents
from slotkeeper.scheduler.types import WITHOUT_PLACE, Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The prompt tokens of one request for which the engine gave figures."""

    prompt: int
    cached: int  # tokens that the engine did not evaluate for the request itself, by its own count
    planted: int = 0  # tokens that our own prefills evaluated for the request before it went to the slot
    prepared: int = 0  # reused tokens that were computed in idle time

    @property
    def evaluated(self) -> int:
        """Tokens that the request itself evaluated."""
        return self.prompt - self.cached

    @property
    def work(self) -> int:
        """All tokens that the engine evaluated for the request while its client waited."""
        return self.evaluated + self.planted

    @property
    def computed(self) -> int:
        return min(self.prompt, self.work)

    @property
    def reused(self) -> int:
        return self.prompt - self.computed


def usage_of(
    prompt: int | None, cached: int | None, *, planted: int = 0, ahead_from: int | None = None
) -> Usage | None:
    """Return the usage of a request; None if the engine gave no figures.

    `ahead_from`: the token from which on the reused state was computed in idle time.
    """
    if prompt is None or cached is None:
        return None
    reused = Usage(prompt=prompt, cached=cached, planted=planted).reused
    prepared = 0 if ahead_from is None else max(0, reused - ahead_from)
    return Usage(prompt=prompt, cached=cached, planted=planted, prepared=prepared)


def oracle(usage: Usage, known: int) -> int:
    """Return the tokens that a perfect cache would have computed: the prompt less its longest known prefix.

    `known` is the length of that prefix in the earlier prompts that we remember. Reused tokens were known
    too, even if we have dropped them from memory, except those of idle work, which no client had sent. The
    result is at least one token, which the engine evaluates before every answer; it is 0 only if the request
    was cancelled before the engine computed any.
    """
    return max(min(1, usage.computed), usage.prompt - max(known, usage.reused - usage.prepared))


class Unknown(StrEnum):
    """Why it is unknown what a perfect cache would have computed for a request."""

    NO_SLOTS = "no_slots"  # the engine does not show its slots: it has no --slots
    NO_KEY = "no_key"  # the engine refuses our key, so nothing of it can be seen
    NO_ENGINE = "no_engine"  # no engine was up, or it had just been lost
    NO_TOKENS = "no_tokens"  # the tokens of its prompt could not be found
    BRIEF = "brief"  # a brief prompt, whose slot had another task before there was time to find its tokens
    NO_COUNT = "no_count"  # it ended without the engine's figures, after plants for it


def hit_rate(reused: int, prompt: int) -> float | None:
    """Return reused / prompt tokens; None if there was no prompt."""
    return reused / prompt if prompt else None


def ratio(computed: int, least: int) -> float | None:
    """Return the tokens computed for each token that a perfect cache computes; None if that is 0."""
    return computed / least if least else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The figures of one answered request, for sums. Either `oracle` or `unknown` is None."""

    usage: Usage
    oracle: int | None
    unknown: Unknown | None
    reused_seconds: float | None = None
    step_seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class Sums:
    """Sums over many requests, and of the engine's other work. Tokens, unless the name says seconds."""

    requests: int = 0
    prompt_tokens: int = 0
    reused: int = 0
    prepared: int = 0  # reused tokens that were computed in idle time
    computed: int = 0
    oracle: int = 0  # of the requests whose oracle is known
    client: int = 0  # evaluated by requests themselves
    plant: int = 0  # evaluated for requests before they went to a slot
    idle: int = 0  # evaluated in idle time
    probe: int = 0  # evaluated to find out the engine's flags
    repeated: int = 0  # computed again: lost by the cache, or unchanged text behind a client's change
    reused_seconds: float | None = None  # of prefill that reuse saved; None: known for no request
    step_seconds: float = 0.0  # of restores, touches, erasures and steers before requests
    unknown_tokens: int = 0  # of `client` and `plant`: for requests whose oracle is unknown
    unknown: Mapping[Unknown, int] = field(default_factory=dict)  # the number of these requests

    @property
    def unknown_requests(self) -> int:
        return sum(self.unknown.values())

    @property
    def hit_rate(self) -> float | None:
        return hit_rate(self.reused, self.prompt_tokens)

    @property
    def waited(self) -> float | None:
        """Tokens that clients waited for, per token that a perfect cache would have computed."""
        return ratio(self.client + self.plant - self.unknown_tokens, self.oracle)

    @property
    def total(self) -> float | None:
        """The same including idle work: prefill amplification."""
        return ratio(self.client + self.plant - self.unknown_tokens + self.idle, self.oracle)

    @property
    def engine(self) -> int:
        """All tokens that the engine evaluated, for whatever purpose."""
        return self.client + self.plant + self.idle + self.probe

    @property
    def saved_seconds(self) -> float | None:
        """Seconds saved; negative if the steps took longer than the prefill would have. None: unknown."""
        return None if self.reused_seconds is None else self.reused_seconds - self.step_seconds

    def add(self, **figures: float) -> None:
        """Add each figure to the field of its name."""
        for name, value in figures.items():
            setattr(self, name, (getattr(self, name) or 0) + value)

    def leave_out(self, why: Unknown, tokens: int, requests: int = 1) -> None:
        """Keep tokens that are in `client` or `plant` out of the ratios: the oracle of these is unknown."""
        self.unknown_tokens += tokens
        self.unknown = {**self.unknown, why: self.unknown.get(why, 0) + requests}

    def count(self, request: Counted) -> None:
        """Add one answered request."""
        usage, unknown = request.usage, request.unknown
        self.add(
            requests=1,
            prompt_tokens=usage.prompt,
            reused=usage.reused,
            prepared=usage.prepared,
            computed=usage.computed,
            client=usage.evaluated,
            plant=usage.planted,
            oracle=request.oracle or 0,
            step_seconds=request.step_seconds,
        )
        if request.reused_seconds is not None:
            self.add(reused_seconds=request.reused_seconds)
        if unknown is not None:
            self.leave_out(unknown, usage.work)

    def shown(self) -> dict[str, Any]:
        """Return the sums and the figures derived from them, for JSON."""
        return asdict(self) | {
            "reused_seconds": _rounded(self.reused_seconds, 3),
            "step_seconds": round(self.step_seconds, 3),
            "saved_seconds": _rounded(self.saved_seconds, 3),
            "hit_rate": _rounded(self.hit_rate),
            "unknown": {why.value: count for why, count in self.unknown.items()},
            "unknown_requests": self.unknown_requests,
            "waited": _rounded(self.waited),
            "total": _rounded(self.total),
        }


def _rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)


# -- tokens computed again -------------------------------------------------------------------------------

UNPLACED: Final = frozenset(
    {
        Reason.UNRENDERED,
        Reason.UNPINNABLE,
        Reason.BRIEF,
        Reason.CLIENT_CHOSE,
        Reason.ENGINE_CHOSE,
        *WITHOUT_PLACE,
    }
)


class Loss(StrEnum):
    """Why known tokens were computed again. Reports, logs, metrics and tests use these values."""

    CHECKPOINT = "checkpoint"  # the slot held them, but had no checkpoint where it had to be cut
    OVERWRITTEN = "overwritten"  # no free slot and no file held them any more
    RESTARTED = "restarted"  # the engine was restarted since, and no file held them
    MISPREDICTED = "mispredicted"  # the engine used less of the slot than predicted
    UNPLACED = "unplaced"  # the client or the engine chose the slot, or the tokens were unknown
    ADAPTERS = "adapters"  # they were computed with other LoRA adapters; the oracle does not count these
    BYPASSED = "bypassed"  # the client asked for a bypass, or for no cache


@dataclass(frozen=True, slots=True)
class Lost:
    """How many tokens were lost, and the cause for most of them."""

    why: Loss
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A request at its end. Reused tokens: `cached` by the engine's count, `predicted` by ours."""

    reason: Reason
    prompt: Tokens
    cached: int
    predicted: int | None
    base: SlotContents | None  # what the slot held when the request began
    known: int  # tokens of the prompt that were ever computed before
    restarted: bool  # whether the engine was restarted since then
    uncached: bool = False  # the client wanted the whole prompt computed


def lost(answered: Answered, tokens: int) -> Lost | None:
    """Return why these tokens, computed beyond the oracle, were lost; None if there are none."""
    return Lost(_why(answered), tokens) if tokens > 0 else None


def _why(answered: Answered) -> Loss:
    if answered.reason is Reason.BYPASS or answered.uncached:
        return Loss.BYPASSED
    cached = answered.cached
    shared = answered.base.tokens.lcp(answered.prompt) if answered.base else 0  # with the slot
    if answered.predicted is not None and answered.predicted - cached > answered.known - answered.predicted:
        return Loss.MISPREDICTED
    if shared - cached > answered.known - shared:  # most of it was in the slot
        return Loss.CHECKPOINT
    if answered.reason in UNPLACED:
        return Loss.UNPLACED
    return Loss.RESTARTED if answered.restarted else Loss.OVERWRITTEN
