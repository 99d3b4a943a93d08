"""Effects: what the scheduler wants done.

The driver carries out each effect and reports the outcome as an event.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Final

from slotkeeper.scheduler.policies.adapters import Scales
from slotkeeper.scheduler.prompts.tokens import EMPTY, Tokens
from slotkeeper.scheduler.requests.figures import Counted, Lost, Unknown, Usage
from slotkeeper.scheduler.slots.engine_model import Known, Snapshot, SnapshotId
from slotkeeper.scheduler.snapshots.budgets import Budgets
from slotkeeper.scheduler.types import (
    NO_ROUTER,
    EngineId,
    ModelName,
    Place,
    Priority,
    PriorityAct,
    Reason,
    RequestId,
    SlotId,
)


class Purpose(StrEnum):
    """Why Slotkeeper prefills a slot itself."""

    TOUCH = "touch"  # one token, so that the engine loads from its RAM cache (T6)
    STEER = "steer"  # the prompt itself, in the slot where the engine will then look for it (T5)
    PLANT = "plant"  # up to a boundary, so that the engine makes a checkpoint there, or a file can be saved
    NEXT = "next"  # the beginning of the next turn's prompt
    CUT = "cut"  # back to a checkpoint, so that the state there can be saved
    BACK = "back"  # to where the next turn continues: the slot is saved there and then overwritten
    HOME = "home"  # forward to where the slot was before its states were saved
    EMPTY = "empty"  # one token, so that the slot frees its cells of a shared KV buffer
    PIECE = "piece"  # one batch of a request that can give way to others behind it
    DRAFT = "draft"  # tokens that complete the draft model's state, or let a file carry it

    @property
    def idle(self) -> bool:
        """Whether this prefill is idle work, not part of one request."""
        return self in {Purpose.CUT, Purpose.HOME, Purpose.DRAFT, Purpose.NEXT, Purpose.EMPTY}


class Poison(StrEnum):
    """What shows that an engine does not hold what it reports. The same in logs, metrics and tests."""

    UNHEARD = "unheard"  # it reused more than this prompt has in common with any earlier prompt
    FOREIGN = "foreign"  # it reused more than this prompt has in common with its slot, and could load nothing
    UNSOUND = "unsound"  # it refused a file, and then did not compute a few tokens from the first one on


class SaveMoment(StrEnum):
    """When a slot is saved."""

    PARK = "park"  # before a request overwrites it
    BOUNDARY = "boundary"  # during a request: other prompts will begin with the same tokens
    PAUSE = "pause"  # its conversation has paused
    CLOSE = "close"  # the sidecar is being stopped


# -- steps: what can be done to a slot before a request goes there, or in idle time ----------------------
# A step is part of a plan. When it begins it becomes an effect: it gets its owner, its slot, and the fields
# that follow from what the slot holds then (steps.py).

NOBODY: Final = RequestId("")
NOWHERE: Final = Place(EngineId(""), SlotId(-1))


@dataclass(frozen=True, slots=True)
class Prefill:
    """Make the slot hold exactly these tokens; answered by `Planted`."""

    tokens: Tokens
    purpose: Purpose
    lora: Scales | None = None  # of LoRA adapters; None: those that the engine has for all
    request: RequestId = NOBODY  # the request or chore that needs it
    place: Place = NOWHERE

    @property
    def parks(self) -> bool:
        """Whether the prefill only drops the last few tokens, so that the state before them can be saved."""
        return self.purpose is Purpose.BACK


@dataclass(frozen=True, slots=True)
class Save:
    """Save what the slot holds to a file, and keep the file if it is complete; answered by `Saved`."""

    moment: SaveMoment
    tokens: Tokens = EMPTY  # what the slot should hold; the token list in the file decides
    size: int = 0  # estimated size in bytes
    cuts: tuple[int, ...] = ()  # where other prompts have diverged: checkpoints there are worth keeping
    stale: tuple[int, ...] = ()  # checkpoints that must not be kept: they belong to other tokens (T11)
    request: RequestId = NOBODY
    place: Place = NOWHERE


@dataclass(frozen=True, slots=True)
class Restore:
    """Restore a file into the slot; answered by `Restored`."""

    snapshot: Snapshot
    within: float = inf  # time limit in seconds for the copy from the cold tier
    request: RequestId = NOBODY
    place: Place = NOWHERE


@dataclass(frozen=True, slots=True)
class Erase:
    """Empty the slot, or the engine would reuse contents that it must not (T9, T11); answered by `Erased`."""

    request: RequestId = NOBODY
    place: Place = NOWHERE


Step = Prefill | Save | Restore | Erase


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Cancel a `Prefill`, because a request needs the engine. Answered by `Planted`."""

    request: RequestId


# -- other effects ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Delete a snapshot's file, or move it to the cold tier."""

    snapshot: SnapshotId
    to_cold: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """Remove a snapshot from the catalog. It stays in the shared store, where it can be found again."""

    snapshot: SnapshotId


@dataclass(frozen=True, slots=True, kw_only=True)
class Prove:
    """Record whether a restore paid off, by the engine's own count of reused tokens."""

    snapshot: SnapshotId
    paid: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimer:
    """Wake the scheduler after `delay` seconds; answered by `TimerFired`."""

    delay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Send a request to an engine. `slot` is None if the request is unpinned."""

    request: RequestId
    engine: EngineId
    slot: int | None  # written into the body; None: an id_slot in the body is removed
    reason: Reason
    changed: bool = False  # whether the form after the rules is sent, not the client's own
    isolated: bool = False  # it cannot reuse any state that another namespace or other adapters left
    strict: bool = False  # it must not reuse such a state: unless `isolated`, it is sent with caching off
    priority: Priority = Priority.NORMAL
    waited: float | None = None  # seconds in our queue; None: it was never queued


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadModel:
    """Ask a router to load a model; answered by `EngineUp` or `SwapFailed`.

    Nothing may be sent meanwhile to the models `aside`: the router may unload some of them for it. They are
    lost (`EngineLost`); those that stay loaded are up again afterwards.
    """

    engine: EngineId
    aside: tuple[EngineId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadModel:
    """Ask a router to unload a model; answered by `ModelsListed` or `SwapFailed`."""

    engine: EngineId


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """A draining engine is at rest: nothing runs there, and slots that are worth it are saved."""

    engine: EngineId


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """Refuse a request, because its model could not be loaded."""

    request: RequestId
    engine: EngineId


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """Something was done about a request because of priorities, deadlines or costs.

    Where it was weighed, `gain` is the time that a more urgent request does not have to wait for this one,
    and `loss` the time that will be spent again, both in seconds.
    """

    request: RequestId
    act: PriorityAct
    priority: Priority
    other: RequestId | None = None  # the more urgent request, or the one that was passed
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
class AskAdapters:
    """Ask GET /lora-adapters; answered by `AdaptersSeen`."""

    engine: EngineId


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """The value of one of an engine's flags was learned."""

    engine: EngineId
    name: str  # the field of `EngineTraits`
    value: float | bool
    how: Known


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgeted:
    """The budgets for snapshots are others now: noticeably, or for the first time."""

    budgets: Budgets


@dataclass(frozen=True, slots=True, kw_only=True)
class Render:
    """Find a request's tokens now: its engine was not known before. `Rendered` must follow in any case."""

    request: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """The engine no longer works for a request whose client left: its slot is free, or it never began."""

    request: RequestId
    held: int | None  # tokens in its slot then, by the engine's count; None: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisoned:
    """An engine reports more reuse than is possible: the contents of its slot must not be used again."""

    request: RequestId
    place: Place | None  # None: it is unknown in which slot the request ran
    why: Poison
    cached: int  # tokens that the engine reports as reused
    possible: int  # tokens, the most that it can have reused


class PoolAct(StrEnum):
    """What was done about the KV buffer that all slots share. The same in metrics, `why` and tests."""

    WAITED = "waited"  # a request was held back, because its cells did not fit
    PARKED = "parked"  # an idle slot was emptied for a request; a file or the RAM cache has its contents
    ERASED = "erased"  # an idle slot was emptied for a request; its contents are lost
    PURGED = "purged"  # the engine emptied an idle slot by itself
    RETRIED = "retried"  # a request failed for lack of cells before its first byte, and was sent again
    FAILED = "failed"  # a request failed for lack of cells


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooled:
    """A request needed cells of a shared KV buffer."""

    request: RequestId
    engine: EngineId
    act: PoolAct
    slot: int | None  # the slot concerned
    cells: int  # cells that were missing, or that a slot freed


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The cost of one request, from the engine's figures. It is sent once all of them are known."""

    request: RequestId
    reason: Reason
    slot: int | None
    usage: Usage | None  # None: the engine reported no figures
    predicted: int | None  # the value of `usage.cached` that we predicted
    oracle: int | None  # tokens that a perfect cache would have computed
    exact: bool | None  # whether we counted as many prompt tokens as the engine; None: it reported none
    lost: Lost | None = None  # tokens computed beyond the oracle, and why
    reused_seconds: float | None = None  # estimated prefill time of the reused tokens
    step_seconds: float = 0.0  # time that the request waited for restores, touches, erasures and steers
    model: ModelName = NO_ROUTER
    unknown: Unknown | None = None  # why there is no oracle

    @property
    def counted(self) -> Counted | None:
        """What the request adds to sums; None without the engine's figures."""
        if self.usage is None:
            return None
        return Counted(
            usage=self.usage,
            oracle=self.oracle,
            unknown=self.unknown,
            reused_seconds=self.reused_seconds,
            step_seconds=self.step_seconds,
        )


Effect = (
    Step
    | Stop
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
    | AskAdapters
    | Learned
    | Budgeted
    | Poisoned
    | Pooled
    | Report
    | Released
    | Render
)
