"""What requests cost, in prompt tokens, and why tokens were computed again. Every figure is defined here.

Metrics, dashboard, `why`, `top`, log, `replay`, `demo` and benchmarks read these; none computes its own.
Of one request, by the engine's own counts:

    prompt = reused + computed
    computed = evaluated by the request itself + planted for it while its client waited
    reused = what earlier work had left; `prepared` of it was computed in idle time

What is planted in vain, because the request then did not go on from it, is work for it all the same. So
`computed` can reach the prompt's length, and is cut off there: the rest is in the engine's work alone.
Engine work is counted by who wanted it: client, plant, idle, probe.

The oracle counts what any prompt before it had in common with this one. What was computed beyond it, the
cache had lost; here is how.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

from slotkeeper.scheduler.slot_contents import SlotContents
from slotkeeper.scheduler.types import Reason, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The prompt tokens of one request that the engine gave figures for."""

    prompt: int
    cached: int  # what the engine says that it did not evaluate for the request itself
    planted: int = 0  # evaluated by our own prefills for it, before it went on
    prepared: int = 0  # of the reused: computed in idle time

    @property
    def evaluated(self) -> int:
        """By the request itself."""
        return self.prompt - self.cached

    @property
    def work(self) -> int:
        """All that the engine evaluated for it while its client waited."""
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
    """None where the engine gave no figures.

    `ahead_from`: the token from which on the state that it found was computed in idle time.
    """
    if prompt is None or cached is None:
        return None
    reused = Usage(prompt=prompt, cached=cached, planted=planted).reused
    prepared = 0 if ahead_from is None else max(0, reused - ahead_from)
    return Usage(prompt=prompt, cached=cached, planted=planted, prepared=prepared)


def oracle(usage: Usage, known: int) -> int:
    """What a perfect cache would have computed: the prompt less its longest beginning in earlier prompts.

    `known` is that beginning, as far as we remember. What was reused was known too, though we may have
    forgotten it, but for what idle work computed: that is no client's. At least one token, which is computed
    before every answer; none where the request was broken off before the engine had computed any.
    """
    return max(min(1, usage.computed), usage.prompt - max(known, usage.reused - usage.prepared))


def hit_rate(reused: int, prompt: int) -> float | None:
    """None where there was no prompt."""
    return reused / prompt if prompt else None


def ratio(computed: int, least: int) -> float | None:
    """Tokens computed for each one that a perfect cache computes; None where it computes none."""
    return computed / least if least else None


@dataclass(slots=True, kw_only=True)
class Sums:
    """Of many requests, and of all that the engine did besides."""

    requests: int = 0
    prompt_tokens: int = 0
    reused: int = 0
    prepared: int = 0  # of the reused
    computed: int = 0
    oracle: int = 0  # where it is not known, what was computed
    client: int = 0  # evaluated by requests themselves
    plant: int = 0  # evaluated for requests before they went on
    idle: int = 0  # evaluated in idle time
    probe: int = 0  # evaluated to find out what the engine is like
    repeated: int = 0  # lost by the cache, or unchanged behind what a client had changed
    reused_seconds: float = 0.0  # of prefill that the reused tokens would have taken
    step_seconds: float = 0.0  # of restores, touches and steers before requests

    @property
    def hit_rate(self) -> float | None:
        return hit_rate(self.reused, self.prompt_tokens)

    @property
    def waited(self) -> float | None:
        """What clients waited for, by what a perfect cache would have computed."""
        return ratio(self.client + self.plant, self.oracle)

    @property
    def total(self) -> float | None:
        """The same with idle work: prefill amplification."""
        return ratio(self.client + self.plant + self.idle, self.oracle)

    @property
    def engine(self) -> int:
        """All that the engine evaluated for us."""
        return self.client + self.plant + self.idle + self.probe

    @property
    def saved_seconds(self) -> float:
        """Less than nothing where the steps took longer than computing would have."""
        return self.reused_seconds - self.step_seconds

    def add(self, **figures: float) -> None:
        """Each by its name."""
        for name, value in figures.items():
            setattr(self, name, getattr(self, name) + value)

    def shown(self) -> dict[str, Any]:
        """For JSON, with what follows from the sums."""
        return asdict(self) | {
            "reused_seconds": round(self.reused_seconds, 3),
            "step_seconds": round(self.step_seconds, 3),
            "saved_seconds": round(self.saved_seconds, 3),
            "hit_rate": _rounded(self.hit_rate),
            "waited": _rounded(self.waited),
            "total": _rounded(self.total),
        }


def of_request(
    usage: Usage, oracle: int | None, reused_seconds: float | None, step_seconds: float
) -> dict[str, float]:
    """What one answered request adds to the sums, by their names."""
    return {
        "requests": 1,
        "prompt_tokens": usage.prompt,
        "reused": usage.reused,
        "prepared": usage.prepared,
        "computed": usage.computed,
        "oracle": usage.computed if oracle is None else oracle,
        "reused_seconds": reused_seconds or 0.0,
        "step_seconds": step_seconds,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


# -- tokens computed again -------------------------------------------------------------------------------

UNPLACED: Final = frozenset(
    {
        Reason.UNRENDERED,
        Reason.UNPINNABLE,
        Reason.BRIEF,
        Reason.CLIENT_CHOSE,
        Reason.ENGINE_CHOSE,
        Reason.FAIL_OPEN,
    }
)


class Loss(StrEnum):
    """In reports, logs, metrics and tests alike."""

    CHECKPOINT = "checkpoint"  # the slot held them, but no checkpoint stood where it had to be cut
    OVERWRITTEN = "overwritten"  # no free slot and no file had them any more
    RESTARTED = "restarted"  # the engine was restarted since, and no file held them
    MISPREDICTED = "mispredicted"  # the engine used less of the slot than it should have
    UNPLACED = "unplaced"  # another party chose its slot, or its tokens were unknown
    BYPASSED = "bypassed"  # the client asked for no help, or for no cache


@dataclass(frozen=True, slots=True)
class Lost:
    """How many tokens, and most of them why."""

    why: Loss
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What is known of a request by its end. `cached` and `predicted` are tokens, by the engine and by us."""

    reason: Reason
    prompt: Tokens
    cached: int
    predicted: int | None
    base: SlotContents | None  # what its slot held when it began
    known: int  # tokens of it that were ever computed before
    restarted: bool  # whether the engine was restarted since then
    uncached: bool = False  # the client wanted all of it computed


def lost(answered: Answered, tokens: int) -> Lost | None:
    """How these tokens, computed beyond the oracle, were lost; None where there are none."""
    return Lost(_why(answered), tokens) if tokens > 0 else None


def _why(answered: Answered) -> Loss:
    if answered.reason is Reason.BYPASS or answered.uncached:
        return Loss.BYPASSED
    cached, shared = answered.cached, _shared(answered)
    if answered.predicted is not None and answered.predicted - cached > answered.known - answered.predicted:
        return Loss.MISPREDICTED
    if shared - cached > answered.known - shared:  # most of it was in the slot
        return Loss.CHECKPOINT
    if answered.reason in UNPLACED:
        return Loss.UNPLACED
    return Loss.RESTARTED if answered.restarted else Loss.OVERWRITTEN


def _shared(answered: Answered) -> int:
    """Tokens that the slot had in common with the prompt."""
    return answered.base.tokens.lcp(answered.prompt) if answered.base else 0
