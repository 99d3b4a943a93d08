"""The states of engines and requests that users see, and what a request waits for: each with one text.

`slotkeeper top`, the dashboard, `/api/state`, `/readyz`, `why`, the log and the metrics use these enums and
texts. This module is pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from slotkeeper.engine.answers import SAID, Health
from slotkeeper.scheduler.requests.figures import Sums, Unknown
from slotkeeper.scheduler.requests.pending import Wait
from slotkeeper.scheduler.types import EngineId, Priority

# -- engines -----------------------------------------------------------------------------------------------

KEY_REFUSED: Final = frozenset({401, 403})  # statuses
NOT_SUPPORTED: Final = 501  # llama-server's status of GET /slots with --no-slots


class EngineState(StrEnum):
    """What an engine is for requests. The first state that applies counts."""

    DRAINED = "drained"  # drained by its operator, and idle; it may be down
    UNLOADED = "unloaded"  # a model that its router has not loaded
    FOREIGN = "foreign"  # the server at its address is no llama-server
    LOOP = "loop"  # its address leads back to this sidecar
    FROZEN = "frozen"  # its process is stopped: it is silent for so long that nothing waits for it
    LOADING = "loading"  # it answers, and loads its model
    SLEEPING = "sleeping"  # the next request wakes it
    AWAITED = "awaited"  # it does not answer and is expected back: requests wait for it
    DOWN = "down"  # it does not answer
    DRAINING = "draining"  # drained by its operator: no request begins there, running answers end
    KEY_REFUSED = "key_refused"  # it answers, but refuses our calls for lack of a key
    NO_SLOTS = "no_slots"  # it answers, but GET /slots is off
    UNPROBED = "unprobed"  # it answers, but the probe failed for another reason
    PROBING = "probing"  # it answers, and its probe is not finished
    FAILING = "failing"  # it answers, but requests fail there: its circuit breaker is open
    SILENT = "silent"  # its last check was not answered in time; if that goes on, it counts as frozen
    UP = "up"


# The rest of a sentence that begins with an engine's name.
ENGINE_TEXTS: Final[Mapping[EngineState, str]] = MappingProxyType(
    {
        EngineState.DRAINED: "is drained: no request begins there until `slotkeeper undrain`",
        EngineState.UNLOADED: "is not loaded: its router loads it for the next request",
        EngineState.FOREIGN: SAID[Health.FOREIGN],
        EngineState.LOOP: SAID[Health.LOOP],
        EngineState.FROZEN: "is frozen: it accepts connections and answers nothing",
        EngineState.LOADING: SAID[Health.LOADING],
        EngineState.SLEEPING: "sleeps: the next request wakes it",
        EngineState.AWAITED: "does not answer, and is expected back",
        EngineState.DOWN: SAID[Health.DOWN],
        EngineState.DRAINING: "is being drained: no request begins there, running answers end",
        EngineState.KEY_REFUSED: "refuses our calls: it wants an API key, see --engine-api-key",
        EngineState.NO_SLOTS: "answers, but its GET /slots is off (--no-slots)",
        EngineState.UNPROBED: "answers, but could not be probed: the log says why (engine_probe_failed)",
        EngineState.PROBING: "answers, and is being probed",
        EngineState.FAILING: "answers, but requests fail there",
        EngineState.SILENT: "has not answered its last check in time",
        EngineState.UP: SAID[Health.OK],
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSigns:
    """What is known of an engine's state."""

    health: Health
    up: bool  # it was probed: requests can be placed
    frozen: bool = False
    expected: bool = False  # it was lost, and requests wait for it
    refusal: int | None = None  # the status with which it refused the last probe
    draining: bool = False
    drained: bool = False
    failing: bool = False


def engine_state(signs: EngineSigns) -> EngineState:
    """Return the state of an engine: the first of `EngineState` that applies."""
    if signs.drained:
        return EngineState.DRAINED
    if not (signs.up or signs.health is Health.OK or signs.health.routes):
        return _unanswered(signs)
    if signs.draining:
        return EngineState.DRAINING
    if signs.up and signs.failing:
        return EngineState.FAILING
    if signs.up or signs.health.routes:
        return EngineState.SILENT if signs.health is Health.SILENT else EngineState.UP
    return _unprobed(signs)


def _unanswered(signs: EngineSigns) -> EngineState:
    """Return the state of an engine that is not up and does not say that it can serve."""
    told = _TOLD.get(signs.health)
    if told is not None:
        return EngineState.DRAINING if signs.draining and told is EngineState.SLEEPING else told
    if signs.expected:
        return EngineState.AWAITED
    return EngineState.FROZEN if signs.frozen else EngineState.DOWN


_TOLD: Final[Mapping[Health, EngineState]] = MappingProxyType(
    {
        Health.UNLOADED: EngineState.UNLOADED,
        Health.FOREIGN: EngineState.FOREIGN,
        Health.LOOP: EngineState.LOOP,
        Health.LOADING: EngineState.LOADING,
        Health.SLEEPING: EngineState.SLEEPING,
    }
)


def _unprobed(signs: EngineSigns) -> EngineState:
    """Return the state of an engine that answers but is not up."""
    if signs.refusal in KEY_REFUSED:
        return EngineState.KEY_REFUSED
    if signs.refusal == NOT_SUPPORTED:
        return EngineState.NO_SLOTS
    return EngineState.UNPROBED if signs.refusal is not None else EngineState.PROBING


# -- what happens to requests that arrive now ----------------------------------------------------------------


class Service(StrEnum):
    """What happens to a request that arrives now. The first that any engine offers counts."""

    PLACED = "placed"  # it gets a slot that we choose
    WAKES = "wakes"  # it wakes an engine, and then gets such a slot
    PASSED = "passed"  # it goes to an engine whose slots we cannot see
    WAITS = "waits"  # it waits for an engine, up to --engine-wait
    HELD = "held"  # it waits until an engine is undrained
    FAILS = "fails"  # it gets an error


SERVICE_TEXTS: Final[Mapping[Service, str]] = MappingProxyType(
    {
        Service.PLACED: "",
        Service.WAKES: "Every engine sleeps: the next request wakes one, and waits until it is loaded.",
        Service.PASSED: (
            "No engine shows its slots: requests go through, but no slot is chosen, "
            "and what is computed twice is not known."
        ),
        Service.WAITS: "No engine is up yet: requests wait for one, for up to {wait} (--engine-wait).",
        Service.HELD: "Every engine is drained: requests wait until `slotkeeper undrain`.",
        Service.FAILS: "No engine is up: requests fail until one is.",
    }
)
_OFFERED: Final[Mapping[EngineState, Service]] = MappingProxyType(
    {
        EngineState.UP: Service.PLACED,
        EngineState.SILENT: Service.PLACED,
        EngineState.FAILING: Service.PLACED,
        EngineState.UNLOADED: Service.PLACED,
        EngineState.SLEEPING: Service.WAKES,
        EngineState.KEY_REFUSED: Service.PASSED,
        EngineState.NO_SLOTS: Service.PASSED,
        EngineState.UNPROBED: Service.PASSED,
        EngineState.PROBING: Service.WAITS,
        EngineState.AWAITED: Service.WAITS,
        EngineState.DRAINING: Service.HELD,
        EngineState.DRAINED: Service.HELD,
    }
)


def service(states: Collection[EngineState], *, waits: bool) -> Service:
    """Return what happens to a request that arrives now, by the states of all engines that could serve it.

    `waits`: whether requests wait for an engine that is lost or still loads its model.
    """
    offered = {_OFFERED.get(state, Service.WAITS if waits else Service.FAILS) for state in states}
    return next((each for each in Service if each in offered), Service.FAILS)


def service_text(found: Service, wait: float) -> str:
    """Return the sentence; `wait`: --engine-wait in seconds."""
    return SERVICE_TEXTS[found].format(wait=duration(wait))


# -- figures -----------------------------------------------------------------------------------------------

# Why it is unknown what a perfect cache would have computed.
UNKNOWN_TEXTS: Final[Mapping[Unknown, str]] = MappingProxyType(
    {
        Unknown.NO_SLOTS: "the engine has no --slots",
        Unknown.NO_KEY: "the engine refuses our key",
        Unknown.NO_ENGINE: "no engine was up",
        Unknown.NO_TOKENS: "their tokens could not be found",
        Unknown.BRIEF: "their brief prompts were replaced at once",
        Unknown.NO_COUNT: "the engine gave no count",
    }
)


def unknown_text(sums: Sums) -> str:
    """Return for how many requests the oracle is unknown, and why; "" if it is known for all of them."""
    if not sums.unknown:
        return ""
    why = ", ".join(UNKNOWN_TEXTS[each] for each in sums.unknown)
    return f"unknown for {sums.unknown_requests:,} of {sums.requests:,} requests: {why}"


# -- the stages of requests ----------------------------------------------------------------------------------


class Spent(StrEnum):
    """On what the time of a request was spent. The stages follow each other, so they add up to its duration.

    `why`, `top`, the page, `/api/requests` and the metric `slotkeeper_stage_seconds` use these values.
    """

    READ = "read"  # reading its body, applying rules, and finding its tokens before it is placed
    ENGINE = "engine"  # waiting until an engine is up
    SWAP = "swap"  # waiting until a router has loaded its model
    QUEUE = "queue"  # waiting for a slot, in our queue
    PREPARE = "prepare"  # plants, touches, steers, saves and erasures in its slot, before it is sent
    RESTORE = "restore"  # loading a file into its slot
    PREFILL = "prefill"  # from when it is sent until its first token
    ANSWER = "answer"  # from the first token to the end


SPENT_NAMES: Final[Mapping[Spent, str]] = MappingProxyType(
    {
        Spent.READ: "reading",
        Spent.ENGINE: "waiting for an engine",
        Spent.SWAP: "waiting for its model",
        Spent.QUEUE: "queue",
        Spent.PREPARE: "preparing",
        Spent.RESTORE: "restore",
        Spent.PREFILL: "prefill",
        Spent.ANSWER: "answer",
    }
)
BRIEF: Final = 0.01  # seconds: shorter stages are not named


def longest(spent: Mapping[Spent, float]) -> list[tuple[Spent, float]]:
    """Return the stages before the first token that took long enough to be named, the longest first."""
    before = ((stage, took) for stage, took in spent.items() if stage is not Spent.ANSWER)
    return sorted(((stage, took) for stage, took in before if took >= BRIEF), key=lambda each: -each[1])


def stages_text(spent: Mapping[Spent, float]) -> str:
    """Return the stages before the first token, the longest first, and then the answer."""
    answer = spent.get(Spent.ANSWER, 0.0)
    named = [*longest(spent), *([(Spent.ANSWER, answer)] if answer >= BRIEF else [])]
    return ", ".join(f"{SPENT_NAMES[stage]} {duration(took)}" for stage, took in named)


# -- requests that have not ended ----------------------------------------------------------------------------


class Doing(StrEnum):
    """The state of a request that has not ended. It follows from its stage."""

    READING = "reading"  # its body is read, and its key is checked
    QUEUED = "queued"  # in our queue, or it waits for an engine or its model
    PREPARING = "preparing"  # its slot is saved, restored, erased, or computed up to a boundary
    PREFILL = "prefill"  # the engine computes its prompt
    GENERATING = "generating"  # it is answered


DOING: Final[Mapping[Spent, Doing]] = MappingProxyType(
    {
        Spent.READ: Doing.READING,
        Spent.ENGINE: Doing.QUEUED,
        Spent.SWAP: Doing.QUEUED,
        Spent.QUEUE: Doing.QUEUED,
        Spent.PREPARE: Doing.PREPARING,
        Spent.RESTORE: Doing.PREPARING,
        Spent.PREFILL: Doing.PREFILL,
        Spent.ANSWER: Doing.GENERATING,
    }
)


# What a queued request waits for.
WAIT_TEXTS: Final[Mapping[Wait, str]] = MappingProxyType(
    {
        Wait.ENGINE: "no engine is up",
        Wait.MODEL: "its model is not loaded yet",
        Wait.DRAINED: "its engines are drained",
        Wait.PRIORITY: "more urgent requests are at work",
        Wait.CELLS: "cells of the KV buffer that all slots share are missing",
        Wait.RUNNING: "as many requests run as --max-running allows",
        Wait.SLOTS: "all slots are busy",
        Wait.IDLE_WORK: "idle work in the slots ends first",
        Wait.BEST_SLOT: "the slot that is cheapest for it is busy",
        Wait.KEPT_SLOT: "the slot is kept for an agent that is about to return",
        Wait.LOOK: "GET /slots has to show which slots are free",
        Wait.TOKENS: "its tokens are counted",
        Wait.TURN: "others are before it",
    }
)
# What is done in the slot of a request before it is sent. The keys are values of `RequestStage`.
STEP_TEXTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "save": "saving what its slot holds",
        "restore": "restoring a snapshot",
        "erase": "erasing its slot",
        "plant": "computing up to a boundary",
    }
)
MOST: Final = 99  # highest percentage before the first token
SHOWN_IDS: Final = 3  # requests that are named in a text
SHORT_ID: Final = 8  # last characters of an id that are shown for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The present state of a request that has not ended."""

    doing: Doing
    place: int | None = None  # in the queue; 1 is the next
    priority: Priority = Priority.NORMAL
    wait: Wait | None = None  # what it waits for in the queue
    behind: tuple[str, ...] = ()  # ids of the requests that it waits for
    step: str | None = None  # what is done in its slot: a key of `STEP_TEXTS`
    computed: int | None = None  # tokens of its prompt that were computed so far
    to_compute: int | None = None
    seconds_left: float | None = None  # of its prefill
    estimated: bool = False  # by the learned rate: the engine reports no progress on this route

    @property
    def percent(self) -> int | None:
        """How much of the prompt is computed; None if it is unknown or longer than estimated."""
        if not self.to_compute or self.computed is None or self.late:
            return None
        return max(0, min(MOST, int(100 * self.computed / self.to_compute)))

    @property
    def done(self) -> bool:
        """Whether all tokens to compute are computed, or should be by the estimate."""
        return bool(self.to_compute) and (self.computed or 0) >= (self.to_compute or 0)

    @property
    def late(self) -> bool:
        return self.done and self.estimated

    def shown(self) -> dict[str, Any]:
        left = self.seconds_left
        return {
            "doing": self.doing.value,
            "text": request_text(self),
            "place": self.place,
            "priority": self.priority.value,
            "wait": self.wait.value if self.wait else None,
            "behind": list(self.behind),
            "step": self.step,
            "percent": self.percent,
            "computed_tokens": None if self.late else self.computed,
            "to_compute_tokens": self.to_compute,
            "seconds_left": None if left is None else round(left, 1),
            "estimated": self.estimated,
        }


def request_text(moment: Moment) -> str:
    """Return what a request does now, in a few words."""
    match moment.doing:
        case Doing.READING:
            return "reading its body"
        case Doing.QUEUED:
            return _queued(moment)
        case Doing.PREPARING:
            return f"{STEP_TEXTS.get(moment.step or '', 'preparing its slot')}{_progress(moment)}"
        case Doing.PREFILL:
            return _prefill(moment)
        case Doing.GENERATING:
            return "answering"


def _queued(moment: Moment) -> str:
    urgency = "" if moment.priority is Priority.NORMAL else f" ({moment.priority.value})"
    place = f", place {moment.place}" if moment.place else ""
    why = f": {wait_text(moment.wait, moment.behind)}" if moment.wait else ""
    return f"queued{urgency}{place}{why}"


def wait_text(wait: Wait, behind: Sequence[str]) -> str:
    """Return for what a request waits, or waited, in the queue, and for which requests."""
    shown = ", ".join(each[-SHORT_ID:] for each in behind[:SHOWN_IDS])
    more = f" and {len(behind) - SHOWN_IDS} more" if len(behind) > SHOWN_IDS else ""
    return WAIT_TEXTS[wait] + (f" ({shown}{more})" if shown else "")


def _prefill(moment: Moment) -> str:
    if moment.done and not moment.estimated:
        return "prefill done, first token not sampled yet"
    if moment.late:
        return "prefill, longer than estimated"
    return f"prefill{_progress(moment)}"


def _progress(moment: Moment) -> str:
    """Return how much of the prompt is computed, to follow a word; "" if that is unknown."""
    if moment.percent is None:
        return ""
    about = "about " if moment.estimated else ""
    left = "" if moment.seconds_left is None else f", {duration(moment.seconds_left)} left"
    return f" {about}{moment.percent} %{left}"


def duration(seconds: float) -> str:
    """Return a duration as text: 340 ms, 12.3 s, 4 min."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSeen:
    """One engine, or one model of a router, at a scrape."""

    engine: EngineId
    state: EngineState
    answers: bool
    losses: int  # since the sidecar began to watch it
