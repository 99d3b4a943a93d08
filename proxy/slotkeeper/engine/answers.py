"""What an engine answers to control calls, as values; how one can fail, and why there are no slot files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from slotkeeper.scheduler.events import SlotView
from slotkeeper.scheduler.types import SlotId


class EngineError(Exception):
    """The engine answered, and the answer was a refusal."""

    def __init__(self, status: int, message: str, *, foreign: bool = False) -> None:
        """`foreign`: no llama-server answers like this."""
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message
        self.foreign = foreign


class EngineGoneError(ConnectionError):
    """No answer: refused, reset, or silent past the time limit."""


class EngineSilentError(EngineGoneError):
    """Silent past the time limit: it may be gone, or on a machine that is too busy to answer."""


class EngineFrozenError(EngineSilentError):
    """It has answered nothing at all for so long that requests no longer wait."""


# -- answers ---------------------------------------------------------------------------------------------

Odds = tuple[tuple[int, float], ...]  # tokens and their logprobs, the likeliest first


class Health(StrEnum):
    """What `GET /health` says, or that nothing did."""

    OK = "ok"
    LOADING = "loading"  # alive, 503 "Loading model" (engine.md 7)
    SLEEPING = "sleeping"  # alive, model unloaded, all slots empty (engine.md 7)
    ROUTER = "router"  # alive, and no engine itself: it loads models, each of which is one
    UNLOADED = "unloaded"  # a model that its router has not loaded
    DOWN = "down"  # nothing listens there, or the connection broke
    SILENT = "silent"  # no answer in time: its machine may be busy
    FOREIGN = "foreign"  # something else answers there
    LOOP = "loop"  # what answers there has sent us our own request

    @property
    def wrong(self) -> bool:
        """Whether waiting does not help: the address must be changed."""
        return self in {Health.FOREIGN, Health.LOOP}


# How a sentence goes on that begins with an engine's address.
SAID: Final[Mapping[Health, str]] = {
    Health.OK: "is up",
    Health.LOADING: "is still loading its model",
    Health.SLEEPING: "sleeps",
    Health.ROUTER: "is a router",
    Health.UNLOADED: "is not loaded",
    Health.DOWN: "does not answer",
    Health.SILENT: "does not answer in time",
    Health.FOREIGN: "is no llama-server: something answers there, but not as llama-server does",
    Health.LOOP: "leads back to this sidecar: requests would go round in a circle",
}


PREFILL_FIELDS: Final = (  # of the last event of a prefill
    "timings/prompt_n",
    "timings/cache_n",
    "timings/prompt_ms",
    "tokens_cached",
    "id_slot",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """What one prefill cost, in tokens, by the engine's own count."""

    computed: int
    cached: int
    held: int  # tokens in the slot afterwards
    slot: SlotId
    seconds: float = 0.0  # of computing, without the time in the engine's queue
    cuts: tuple[int, ...] | None = None  # where batches ended, in tokens of the prompt; None: it did not say


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """A slot's state in a file. T3: it is whole only if the file's size is `written`."""

    tokens: int
    written: int  # bytes
    seconds: float  # for which all slots stood still, without the time in the engine's queue


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreResult:
    """A file's state in a slot. A `read` below the file's size: its checkpoints were not taken."""

    tokens: int
    read: int  # bytes
    seconds: float  # as above


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPrompt:
    """A prompt with images, as /completion takes it: a text with a marker for each, and their bytes."""

    text: str
    data: tuple[str, ...] = field(repr=False)  # base64
    length: int  # tokens

    def __len__(self) -> int:
        return self.length

    @property
    def body(self) -> dict[str, Any]:
        return {"prompt_string": self.text, "multimodal_data": self.data}


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """What may follow a prompt."""

    odds: Odds
    held: int  # tokens in the slot afterwards
    slot: SlotId


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """What an engine says after a prompt: the likeliest tokens at each step, the best first."""

    steps: tuple[Odds, ...]
    held: int  # tokens in the slot afterwards
    slot: SlotId


def seconds(said: Mapping[str, Any], name: str) -> float:
    return float(said.get("timings", {}).get(name, 0)) / 1000


def view(slot: Mapping[str, Any]) -> SlotView:
    return SlotView(
        slot=SlotId(slot["id"]),
        busy=slot["is_processing"],
        task=slot.get("id_task"),
        speculative=slot.get("speculative", False),
        held=slot.get("n_prompt_tokens"),
    )


# -- slot files: why there are none ----------------------------------------------------------------------


class Why(StrEnum):
    """Why there are no slot files to work with."""

    OFF = "off"
    NO_FOLDER = "no_folder"
    NOT_SHARED = "not_shared"
    UNREADABLE = "unreadable"
    UNKNOWN = "unknown"
    REFUSED = "refused"
    CUT = "cut"
    BUSY = "busy"
    UNCERTAIN = "uncertain"


# What is so, and what to do.
NO_FILES: Final[Mapping[Why, tuple[str, str]]] = {
    Why.OFF: (
        "The engine saves no slots.",
        "Add --slot-save-path, with the folder that Slotkeeper is given.",
    ),
    Why.NO_FOLDER: ("The folder is not there.", "Make it, or mount what should be there."),
    Why.NOT_SHARED: (
        "What the engine saves does not appear in the folder.",
        "Its --slot-save-path and our --slot-dir must be the same folder of the same disk.",
    ),
    Why.UNREADABLE: (
        "What the engine saves cannot be read or removed here.",
        "Run both as one user, who owns the folder.",
    ),
    Why.CUT: ("Less lies in the folder than the engine says it has written.", "Make room there."),
    Why.UNKNOWN: ("Its slot files are of a kind that Slotkeeper does not know.", "Use another build."),
    Why.REFUSED: (
        "The engine could not save a slot.",
        "Look for room in the folder, and into the engine's log.",
    ),
    Why.UNCERTAIN: (
        "The engine does not list its LoRA adapters, so what would fit it is not known.",
        "Use another build.",
    ),
    Why.BUSY: ("No slot became idle, so none could be saved.", "Try again when there is less to do."),
}


class NoFilesError(Exception):
    """No snapshots with this engine. The text says why and what to do."""

    def __init__(self, why: Why, detail: str = "") -> None:
        what, self.do = NO_FILES[why]
        self.what = f"{what.removesuffix('.')} ({detail})." if detail else what
        super().__init__(f"{self.what} {self.do}")
        self.why = why
