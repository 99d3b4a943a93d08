"""Events: everything that the scheduler is informed of. Each carries its time; the scheduler has no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slotkeeper.scheduler.policies.adapters import Adapter, Scales, space_of
from slotkeeper.scheduler.policies.router import ModelView
from slotkeeper.scheduler.prompts.tokens import Boundary, Tokens
from slotkeeper.scheduler.requests.figures import Unknown
from slotkeeper.scheduler.slots.engine_model import EngineTraits, Snapshot, SnapshotId
from slotkeeper.scheduler.snapshots.budgets import FolderRoom
from slotkeeper.scheduler.types import (
    NO_HINTS,
    NO_ROUTER,
    ClientId,
    EngineId,
    Loading,
    ModelName,
    Reason,
    RequestHints,
    RequestId,
    SlotView,
    Tier,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """The head of a request arrived, its body follows: meanwhile engines can be polled for its place."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A request that will take a slot arrived. Its tokens follow in `Rendered`."""

    at: float
    request: RequestId
    client: ClientId
    namespace: str = ""  # states are shared only within it; empty: namespaces are off
    lora: Scales | None = None  # LoRA scales of its own; None: those that the engine has for all
    adapters: str = ""  # the set of adapters that `lora` means on the engine where the request goes
    model: ModelName = NO_ROUTER  # the model that must serve the request
    pinnable: bool = True  # whether the route honours id_slot
    rendered: bool = True  # whether `Rendered` will follow
    id_slot: int | None = None  # the slot that the client chose
    copies: int = 1  # `n`: how many slots the request takes
    hash_chain: tuple[bytes, ...] = ()
    rewritten: tuple[bytes, ...] | None = None  # hash chain after the rules; None: they change nothing
    moved: int = 0  # bytes that rules move elsewhere, see `pending.Weighed`
    most: int = 0  # most tokens that the form after the rules may have; 0: any number
    brief: bool = False  # at most about a hundred tokens: finding its prefix costs more than it saves
    uncached: bool = False  # cache_prompt is false: the engine computes the whole prompt
    generates: bool = True  # if not, nothing in the answer says how much was reused
    action: bool = False  # not a task: the client's own save, restore or erase of `id_slot`
    resumable: bool = False  # X-Conversation-Id: the engine continues after a disconnect
    bypass: bool = False
    unplaced: Reason | None = None  # why no engine could place it on arrival; None: one could, or may soon
    slotless: bool = False  # takes no slot: only needs its model to be loaded
    kind: str = ""  # of client: the program and its user, whose answers have similar lengths
    answer_limit: int | None = None  # most tokens of the answer, as set by the client
    size: int = 0  # bytes of the body
    outgrown: bool = False  # failed once already for lack of KV cells, see `kv_pool`
    hints: RequestHints = NO_HINTS

    @property
    def space(self) -> str:
        """Within which states are shared: its namespace's, and its adapters'."""
        return space_of(self.namespace, self.adapters)

    @property
    def without_plan(self) -> Reason:
        """Why it goes out without a place, if it does."""
        return self.unplaced or (Reason.BYPASS if self.bypass else Reason.NO_ENGINE)

    @property
    def to_be_pinned(self) -> bool:
        return self.copies == 1 and (self.pinnable or self.id_slot is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """The exact prompt of a request; None if it cannot be known, for the reason `unknown`."""

    at: float
    request: RequestId
    prompt: Tokens | None
    boundaries: tuple[Boundary, ...] = ()
    rewritten: Tokens | None = None  # the prompt after the rules
    rewritten_boundaries: tuple[Boundary, ...] = ()
    unknown: Unknown = Unknown.NO_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """A `Prefill` ended. `computed`: tokens that the engine evaluated; None if it failed or was stopped."""

    at: float
    request: RequestId
    computed: int | None
    wasted: int = 0  # tokens that were evaluated although it failed
    seconds: float | None = None  # time that the engine reported
    copied_seconds: float | None = None  # the time of the call without those: mostly copies to and from RAM
    stopped: bool = False  # by us: the engine keeps the batches that were done
    unsent: bool = False  # the engine was not asked, so the slot is as it was
    cuts: tuple[int, ...] | None = None  # where batches ended, in tokens of the prompt; None: not reported


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A `Save` ended, or the check of its file. `snapshot` is what was kept; None if nothing was.

    `tokens` and `checkpoints` are what the slot held, read from the engine's own file. The snapshot that was
    kept may have more or fewer checkpoints.
    """

    at: float
    request: RequestId
    snapshot: Snapshot | None
    tokens: Tokens | None = None
    checkpoints: tuple[int, ...] = ()
    seconds: float = 0.0  # time that the engine reported
    lasting: bool = False  # if it failed: further saves would fail too, for a while
    written: bool = False  # the engine wrote the file, which is not checked yet: another `Saved` will follow
    engine: EngineId | None = None  # in that one: the engine that wrote the file


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A `Restore` ended."""

    at: float
    request: RequestId
    outcome: Loading
    checkpoints: bool = True  # whether the checkpoints in the file were loaded too
    seconds: float = 0.0  # time that the engine reported
    brought: float = 0.0  # seconds that the copy from the cold tier took, also if it was given up


@dataclass(frozen=True, slots=True, kw_only=True)
class Erased:
    """An `Erase` ended."""

    at: float
    request: RequestId
    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotsChanged:
    """Snapshots were found or changed their tier. Those in `gone` must not be offered any more.

    `counted` are the bytes that now count for snapshots in the cold tier, where states have parts in common.
    """

    at: float
    snapshots: tuple[Snapshot, ...] = ()
    counted: tuple[tuple[SnapshotId, int], ...] = ()
    gone: tuple[SnapshotId, ...] = ()
    more: bool = False  # others follow at once, so it is not known yet which ones have no room


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomSeen:
    """The file systems of the folders for snapshots, as far as they can be measured now."""

    at: float
    rooms: Mapping[Tier, FolderRoom]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired:
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """The sidecar is being stopped: slots that are worth it are saved now."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The first bytes of the engine's answer arrived: the task is in its slot."""

    at: float
    request: RequestId
    before_prefill: bool = False  # the engine was asked for progress, so that they come before it computes


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The answer ended. The figures are the engine's own; None where it reported none."""

    at: float
    request: RequestId
    prompt_tokens: int | None = None
    cached: int | None = None
    generated: int | None = None
    slot: int | None = None
    prefill_seconds: float | None = None  # time that the engine took to compute the new part of the prompt
    failed: bool = False  # the engine ended it with an error
    calls_tools: bool | None = None  # it asks for tools, so its agent goes on at once; None: not known

    @property
    def left(self) -> int:
        """The tokens left in its slot: the prompt and all sampled tokens but the last; 0: it failed."""
        return 0 if self.prompt_tokens is None else self.prompt_tokens + max(0, (self.generated or 0) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Acted:
    """A client's own slot action ended. `left`: tokens in the slot now; None: the slot is unchanged."""

    at: float
    request: RequestId
    left: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exceeded:
    """The engine lacked KV cells for a request. `again`: we send it again; `Gone` or `Finished` follows."""

    at: float
    request: RequestId
    again: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """The client disconnected, or the answer broke off. The engine may still be running the task.

    `reached` and `cached` are from the engine's last progress report: tokens of the prompt that it had
    processed, and how many of these were reused.
    """

    at: float
    request: RequestId
    reached: int | None = None  # None: no report
    cached: int = 0
    planted: int = 0  # tokens evaluated by a prefill of ours that was broken off too


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyKnown:
    """The token ids of prompt and reply together, as the next turn will send them."""

    at: float
    request: RequestId
    tokens: Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class NextKnown:
    """The beginning of the next turn's prompt, as far as it does not depend on what the client writes."""

    at: float
    request: RequestId
    tokens: Tokens | None  # None: unknown
    chance: float  # that the next turn begins so


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The engine answered GET /slots. `asked`: when the question was sent."""

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
    """An engine answers. `fresh`: its slots are empty and free; otherwise they may hold and run anything."""

    at: float
    engine: EngineId
    traits: EngineTraits
    fresh: bool = True
    model: ModelName = NO_ROUTER  # the model that it serves


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesFound:
    """The slot files of a running engine have become usable. `traits` has the new facts about them."""

    at: float
    engine: EngineId
    traits: EngineTraits


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptersChange:
    """A client is about to change an engine's adapters through us: no task begins before `AdaptersSeen`."""

    at: float
    engine: EngineId


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptersSeen:
    """The engine's answer to GET /lora-adapters, sent at `asked`; `adapters` is None if there was no answer.

    `announced`: this event ends an `AdaptersChange`. `exact`: every task that ran meanwhile had begun before
    the change.
    """

    at: float
    asked: float
    engine: EngineId
    adapters: tuple[Adapter, ...] | None
    announced: bool = False
    exact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLost:
    """An engine is gone. `returns`: it exited or is being restarted, so it is expected back."""

    at: float
    engine: EngineId
    returns: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainAsked:
    """An operator takes an engine out of use, or puts it back. Answered by `Drained` once it is at rest."""

    at: float
    engine: EngineId
    drain: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginesNamed:
    """The complete list of engines from now on. An engine that is missing from it must be at rest."""

    at: float
    engines: tuple[EngineId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailed:
    """An engine that is up failed to serve a request. `broken`: it gave no answer at all."""

    at: float
    engine: EngineId
    broken: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsListed:
    """The models of a router; none if it does not answer. `most`: how many may be loaded; 0: no limit.

    `chooses`: the router itself chooses which models leave for another, and does not say which.
    """

    at: float
    router: EngineId
    models: tuple[ModelView, ...]
    most: int = 0
    chooses: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapFailed:
    """A `LoadModel` or an `UnloadModel` failed."""

    at: float
    engine: EngineId
    broken: bool = False  # the model cannot be loaded, and another try would unload another model for nothing


Event = (
    Announced
    | Arrived
    | Rendered
    | Planted
    | Saved
    | Restored
    | Erased
    | SnapshotsChanged
    | RoomSeen
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
    | AdaptersChange
    | AdaptersSeen
    | EngineLost
    | DrainAsked
    | EnginesNamed
    | RequestFailed
    | ModelsListed
    | SwapFailed
)
