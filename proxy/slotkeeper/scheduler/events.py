"""What happens to us. Every event carries the time at which it happened; the scheduler has no clock."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from slotkeeper.scheduler.engine_model import EngineTraits
from slotkeeper.scheduler.hints import NO_HINTS, Hints
from slotkeeper.scheduler.slot_contents import Snapshot, SnapshotId
from slotkeeper.scheduler.types import (
    NO_ROUTER,
    Boundary,
    ClientId,
    EngineId,
    ModelName,
    RequestId,
    SlotId,
    Tokens,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotView:
    """One slot in the engine's own listing (engine.md 1.7)."""

    slot: SlotId
    busy: bool
    task: int | None = None  # the last or the running task; None if the slot never ran one
    speculative: bool = False  # a draft model or MTP works here
    held: int | None = None  # tokens in the slot now; None if it never ran a task, also after a restore


# -- events ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A request that will take a slot. Its tokens follow in `Rendered`."""

    at: float
    request: RequestId
    client: ClientId
    namespace: str = ""  # within which states are shared; empty: namespaces are off
    model: ModelName = NO_ROUTER  # that must serve it
    pinnable: bool = True  # whether the route honours id_slot
    rendered: bool = True  # whether `Rendered` will follow
    id_slot: int | None = None  # the client's own choice
    copies: int = 1  # n: slots it takes
    hash_chain: tuple[bytes, ...] = ()
    rewritten: tuple[bytes, ...] | None = (
        None  # its hash chain as rules would have it; None: they change nothing
    )
    moved: int = 0  # bytes: what rules put elsewhere, see `pending.Weighed`
    most: int = 0  # tokens that it may have as rules would have it; 0: any number
    brief: bool = False  # at most a hundred tokens: finding its prefix costs more than it saves
    adapted: bool = False  # LoRA scales of its own
    uncached: bool = False  # cache_prompt is false: the engine will compute all of it
    generates: bool = True  # else nothing in its answer tells what was reused
    action: bool = False  # no task, but a client's own save, restore or erasure of `id_slot`
    resumable: bool = False  # X-Conversation-Id: the engine goes on after a disconnect
    bypass: bool = False
    slotless: bool = False  # it takes no slot: it only needs its model to be loaded
    kind: str = ""  # of client: the program and its user, whose answers are alike in length
    answer_limit: int | None = None  # tokens that its answer may have, as its client says
    size: int = 0  # bytes of its body
    outgrown: bool = False  # it has failed for lack of cells once, see `kv_pool`
    hints: Hints = NO_HINTS

    @property
    def to_be_pinned(self) -> bool:
        return self.copies == 1 and (self.pinnable or self.id_slot is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """The request's exact prompt, or None when it cannot be known."""

    at: float
    request: RequestId
    prompt: Tokens | None
    boundaries: tuple[Boundary, ...] = ()
    rewritten: Tokens | None = None  # the prompt as rules would have it
    rewritten_boundaries: tuple[Boundary, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """A `Plant` effect ended. `computed` tokens were evaluated for it; None if it failed or was stopped."""

    at: float
    request: RequestId
    computed: int | None
    wasted: int = 0  # where it failed: evaluated all the same
    seconds: float | None = None  # that the engine took
    stopped: bool = False  # by us: the engine keeps the batches that were done
    cuts: tuple[int, ...] | None = None  # where batches ended, in tokens of the prompt; None: it did not say


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A `Save` effect ended. `snapshot` is what was kept, None if it failed.

    `tokens` and `checkpoints` are what the slot held, by the engine's own file; the one that was kept may
    have more of them, or fewer.
    """

    at: float
    request: RequestId
    snapshot: Snapshot | None
    tokens: Tokens | None = None
    checkpoints: tuple[int, ...] = ()
    seconds: float = 0.0  # that the engine took
    lasting: bool = False  # where it failed: so would the next ones, for a while
    written: bool = False  # by the engine, and no more than that yet: `Filed` will follow


@dataclass(frozen=True, slots=True, kw_only=True)
class Filed:
    """What came of a file that its engine had written. `tokens` and `checkpoints` as in `Saved`."""

    at: float
    engine: EngineId
    request: RequestId
    snapshot: Snapshot | None
    tokens: Tokens | None = None
    checkpoints: tuple[int, ...] = ()
    seconds: float = 0.0  # that the engine took
    lasting: bool = False


class Loading(StrEnum):
    """How a restore ended."""

    DONE = "done"
    UNFIT = "unfit"  # the file is gone or damaged: the engine was not asked, the slot is as it was
    REFUSED = "refused"  # by the engine, which has emptied the slot
    LOST = "lost"  # no answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A `Restore` effect ended."""

    at: float
    request: RequestId
    outcome: Loading
    checkpoints: bool = True  # whether those in the file came into memory
    seconds: float = 0.0  # that the engine took
    brought: float = 0.0  # seconds that the way from the cold tier took, or had taken when it was given up


@dataclass(frozen=True, slots=True, kw_only=True)
class Erased:
    """An `Erase` effect ended."""

    at: float
    request: RequestId
    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotsChanged:
    """Snapshots that were found, or whose tier has changed; `gone` are offered no more."""

    at: float
    snapshots: tuple[Snapshot, ...] = ()
    gone: tuple[SnapshotId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired:
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """We are being stopped: whatever is worth it is saved now."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The engine's first bytes of an answer: the task is in its slot."""

    at: float
    request: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The answer came to its end. Figures are the engine's own; None where it did not say."""

    at: float
    request: RequestId
    prompt_tokens: int | None = None
    cached: int | None = None
    generated: int | None = None
    slot: int | None = None
    prefill_seconds: float | None = None  # that the engine took for what it computed of the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Acted:
    """A client's own slot action ended. `left`: tokens that the slot holds now; None: it is as it was."""

    at: float
    request: RequestId
    left: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exceeded:
    """The engine had no cells left for a request. `again`: it is sent again; `Gone` or `Finished` follows."""

    at: float
    request: RequestId
    again: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """The client left, or the answer broke off: the engine may still be at work on it.

    How far it was by then, as it said last: so many tokens of the prompt, of which it had `cached` some.
    """

    at: float
    request: RequestId
    reached: int | None = None  # None: it did not say
    cached: int = 0
    planted: int = 0  # evaluated by a prefill of ours that was broken off as well


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyKnown:
    """The ids of prompt and reply together, as the next turn will send them."""

    at: float
    request: RequestId
    tokens: Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class NextKnown:
    """What the next turn's prompt will begin with, as far as it is not its client's to write."""

    at: float
    request: RequestId
    tokens: Tokens | None  # None: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """GET /slots, as the engine answered it; `asked` is when the question went out."""

    at: float
    asked: float
    engine: EngineId
    slots: tuple[SlotView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveFailed:
    at: float
    engine: EngineId


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUp:
    """An engine answers. `fresh`: its slots are empty and free; else that must be looked at first."""

    at: float
    engine: EngineId
    traits: EngineTraits
    fresh: bool = True
    model: ModelName = NO_ROUTER  # that it serves


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesFound:
    """The slot files of an engine that is up can be used now: these of its traits are new."""

    at: float
    engine: EngineId
    traits: EngineTraits


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLost:
    """An engine is not there any more. `returns`: it has ended, or is being started again."""

    at: float
    engine: EngineId
    returns: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainAsked:
    """An engine's user takes it out of use, or puts it back. Answered by `Drained` once it is at rest."""

    at: float
    engine: EngineId
    drain: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginesNamed:
    """All engines that there are from now on. Those that are gone must be at rest."""

    at: float
    engines: tuple[EngineId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailed:
    """An engine that is up failed at a request. `broken`: it gave no answer at all."""

    at: float
    engine: EngineId
    broken: bool


class ModelStatus(StrEnum):
    """Of one model, as its router says."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    SLEEPING = "sleeping"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """One model in its router's listing (engine.md 13)."""

    engine: EngineId
    name: ModelName
    status: ModelStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsListed:
    """Which models a router has. `most`: how many may be loaded at once; 0: as many as there are.

    Without any model the router does not answer.
    """

    at: float
    router: EngineId
    models: tuple[ModelView, ...]
    most: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapFailed:
    """A `LoadModel` or an `UnloadModel` did not do what it should."""

    at: float
    engine: EngineId
    broken: bool = False  # the model cannot be loaded, and the next try would cost another one its place


Event = (
    Arrived
    | Rendered
    | Planted
    | Saved
    | Filed
    | Restored
    | Erased
    | SnapshotsChanged
    | TimerFired
    | Closing
    | Started
    | Finished
    | Exceeded
    | Acted
    | Gone
    | ReplyKnown
    | NextKnown
    | Observed
    | ObserveFailed
    | EngineUp
    | FilesFound
    | EngineLost
    | DrainAsked
    | EnginesNamed
    | RequestFailed
    | ModelsListed
    | SwapFailed
)
