"""What the scheduler wants done: effects, and the steps of plans that become effects.

The driver does it and reports the outcome as an event.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from slotkeeper.scheduler.engine_model import Known
from slotkeeper.scheduler.figures import Lost, Usage
from slotkeeper.scheduler.hints import Priority, PriorityAct
from slotkeeper.scheduler.slot_contents import Snapshot, SnapshotId
from slotkeeper.scheduler.types import NO_ROUTER, EngineId, ModelName, Place, Reason, RequestId, Tokens


class Purpose(StrEnum):
    """Why we prefill something ourselves."""

    TOUCH = "touch"  # one token, so that the engine loads from its RAM cache (T6)
    STEER = "steer"  # the prompt itself, where the engine will then look for it (T5)
    PLANT = "plant"  # up to a boundary, so that the engine makes a checkpoint there, or a file can be had
    NEXT = "next"  # what the next turn will begin with
    CUT = "cut"  # back to a checkpoint, so that the state there can be saved
    BACK = "back"  # to where the next turn will go on, since the slot is overwritten once that is saved
    HOME = "home"  # forward again to where the slot was before its states were saved
    EMPTY = "empty"  # one token, so that a slot gives up its cells of a shared KV buffer
    PIECE = "piece"  # one batch of a request that can give way to others behind each
    DRAFT = "draft"  # tokens that make the draft model's state whole, or let a file carry it

    @property
    def idle(self) -> bool:
        """Whether it is idle work, not work for one request."""
        return self in {Purpose.CUT, Purpose.HOME, Purpose.DRAFT, Purpose.NEXT, Purpose.EMPTY}


class Poison(StrEnum):
    """What shows that an engine does not hold what it says. In logs, metrics and tests alike."""

    UNHEARD = "unheard"  # it reused more than any prompt before had in common with this one
    FOREIGN = "foreign"  # it reused more than its slot had in common with this one, and could load nothing
    UNSOUND = "unsound"  # it refused a file, and then did not compute a few tokens from the first one on


class SaveMoment(StrEnum):
    """When a slot is saved."""

    PARK = "park"  # before a request overwrites it
    BOUNDARY = "boundary"  # on the way: others will begin with it
    PAUSE = "pause"  # its conversation has paused
    CLOSE = "close"  # we are being stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """Prefill `tokens` in a slot; answered by `Planted`. `request` is whose step it is, also of a chore's."""

    request: RequestId
    place: Place
    tokens: Tokens
    purpose: Purpose


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Cancel a `Plant`: a request needs the engine. Answered by `Planted`."""

    request: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Save a slot to a file and keep it if it is whole; answered by `Saved`."""

    request: RequestId
    place: Place
    moment: SaveMoment
    tokens: Tokens  # that the slot should hold; the file's own list is the truth
    size: int  # bytes, as far as can be foretold
    cuts: tuple[int, ...] = ()  # where prompts have parted from it: checkpoints there are worth keeping
    stale: tuple[int, ...] = ()  # checkpoints that must not be kept: they are of other tokens (T11)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Restore a file into a slot; answered by `Restored`."""

    request: RequestId
    place: Place
    snapshot: Snapshot
    within: float = inf  # seconds for bringing it from the cold tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Erase:
    """Empty a slot; answered by `Erased`."""

    request: RequestId
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Delete a snapshot's file, or move it to the cold tier."""

    snapshot: SnapshotId
    to_cold: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """Remember a snapshot no more that stays in the shared store, where it can be found again."""

    snapshot: SnapshotId


@dataclass(frozen=True, slots=True, kw_only=True)
class Prove:
    """Whether a restore paid, by the engine's own count."""

    snapshot: SnapshotId
    paid: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimer:
    """Something will be due in `delay` seconds; answered by `TimerFired`."""

    delay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Send the request on. `slot` is None where it goes unpinned."""

    request: RequestId
    engine: EngineId
    slot: int | None  # written into the body; None: any that the body names is taken out
    reason: Reason
    changed: bool = False  # whether it goes as rules would have it; else as its client wrote it
    apart: bool = False  # it can meet nothing that another namespace has left in the engine
    priority: Priority = Priority.NORMAL
    waited: float | None = None  # seconds in our queue; None: it never was there


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadModel:
    """Have a router load a model; answered by `EngineUp` or `SwapFailed`."""

    engine: EngineId


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadModel:
    """Have a router unload a model; answered by `ModelsListed` or `SwapFailed`."""

    engine: EngineId


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """An engine that is being drained is at rest: nothing runs there, and what is worth it is saved."""

    engine: EngineId


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """A request cannot be served: its model could not be loaded."""

    request: RequestId
    engine: EngineId


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """Something was done about a request because of priorities or deadlines.

    Where it was weighed, `gain` is the time that a more urgent request does not have to wait for this one,
    and `loss` the time that will be spent again, both in seconds.
    """

    request: RequestId
    act: PriorityAct
    priority: Priority
    other: RequestId | None = None  # the more urgent request
    engine: EngineId | None = None
    waited: float = 0.0  # seconds in our queue so far
    gain: float | None = None
    loss: float | None = None
    retry_after: int = 0  # seconds after which a slot will probably be free; of one that has expired


@dataclass(frozen=True, slots=True, kw_only=True)
class Observe:
    """Ask GET /slots after `delay` seconds; answered by `Observed` or `ObserveFailed`."""

    engine: EngineId
    delay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """One of an engine's flags was learned."""

    engine: EngineId
    name: str  # the field of its traits
    value: float | bool
    how: Known


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisoned:
    """An engine says that it reused more than is possible: what its slot held is not to be used again."""

    request: RequestId
    place: Place | None  # None: it could not be seen where it ran
    why: Poison
    cached: int  # tokens, as the engine says
    possible: int


class PoolAct(StrEnum):
    """What was done about the KV buffer that all slots share. In metrics, `why` and tests alike."""

    WAITED = "waited"  # a request was held back, because its cells did not fit
    PARKED = "parked"  # an idle slot was emptied for one; a file or the RAM cache has what it held
    ERASED = "erased"  # the same, and nothing has it
    PURGED = "purged"  # the engine has emptied an idle slot by itself
    RETRIED = "retried"  # a request failed for lack of cells, before its client had a byte, and went again
    FAILED = "failed"  # a request failed for lack of cells


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooled:
    """Cells of a shared KV buffer were wanted for a request."""

    request: RequestId
    engine: EngineId
    act: PoolAct
    slot: int | None  # that it is about
    cells: int  # that were missing, or that a slot gave up


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one request cost, from the engine's figures, once all of it is known."""

    request: RequestId
    reason: Reason
    slot: int | None
    usage: Usage | None  # None: the engine gave no figures
    predicted: int | None  # what we said `usage.cached` would be
    oracle: int | None  # tokens a perfect cache would have computed
    exact: bool | None  # whether our count of prompt tokens was the engine's; None: no figure to compare
    lost: Lost | None = None  # computed beyond the oracle
    reused_seconds: float | None = None  # of prefill that the reused tokens would have taken
    step_seconds: float = 0.0  # that it waited for restores, touches and steers
    model: ModelName = NO_ROUTER


Effect = (
    Plant
    | Stop
    | Save
    | Restore
    | Erase
    | Drop
    | Forget
    | Prove
    | SetTimer
    | Forward
    | LoadModel
    | UnloadModel
    | Drained
    | Refuse
    | Ranked
    | Observe
    | Learned
    | Poisoned
    | Pooled
    | Report
)


# -- steps: what can be done to a slot before a request goes there, or in idle time ----------------------
# A step is part of a plan; bound to its owner and its slot it is an effect (steps.py).


@dataclass(frozen=True, slots=True)
class Prefill:
    """Make the slot hold exactly these tokens."""

    tokens: Tokens
    purpose: Purpose

    @property
    def parks(self) -> bool:
        """Whether it only gives up a few tokens, so that the state behind them can be saved."""
        return self.purpose is Purpose.BACK


@dataclass(frozen=True, slots=True)
class Keep:
    """Save what the slot holds."""

    moment: SaveMoment


@dataclass(frozen=True, slots=True)
class Load:
    """Restore a file into the slot."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Wipe:
    """Empty the slot: the engine would go on from it where it must not (T9, T11)."""


Step = Prefill | Keep | Load | Wipe
