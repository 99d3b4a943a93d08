"""Answers of an engine to control calls, as values; how a call can fail, and why there are no slot files."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from slotkeeper.scheduler.policies.adapters import Scales
from slotkeeper.scheduler.types import SlotId, SlotView

NO_DESCRIPTOR: Final = frozenset({errno.EMFILE, errno.ENFILE})  # of this process, of this machine


class EngineError(Exception):
    """The engine answered with a refusal."""

    def __init__(self, status: int, message: str, *, foreign: bool = False) -> None:
        """`foreign`: no llama-server answers like this."""
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message
        self.foreign = foreign


class EngineGoneError(ConnectionError):
    """No answer: the connection was refused or reset, or the time limit passed."""


class EngineUnaskedError(EngineGoneError):
    """The engine was not asked: no file descriptor is left here for a connection."""


class EngineSilentError(EngineGoneError):
    """The time limit passed: the engine may be gone, or its machine too busy to answer."""


class EngineFrozenError(EngineSilentError):
    """The engine has not answered for so long that requests no longer wait for it."""


# -- answers ---------------------------------------------------------------------------------------------

Odds = tuple[tuple[int, float], ...]  # tokens and their logprobs, the likeliest first


class Health(StrEnum):
    """The state of the server at an engine's address, by its answers to GET /health and GET /props."""

    OK = "ok"
    LOADING = "loading"  # alive, 503 "Loading model" (engine.md 7)
    SLEEPING = "sleeping"  # alive, model unloaded, all slots empty (engine.md 7)
    ROUTER = "router"  # alive, and not an engine itself: each model that it loads is one
    SWAPPER = "llama-swap"  # the same, but it is llama-swap
    UNLOADED = "unloaded"  # a model that its router has not loaded
    DOWN = "down"  # nothing listens there, or the connection broke
    SILENT = "silent"  # no answer in time: its machine may be busy
    UNASKED = "unasked"  # it was not asked, for want of a file descriptor here; nothing is known of it
    FOREIGN = "foreign"  # the server there is not a llama-server
    LOOP = "loop"  # the request came back to this sidecar

    @property
    def wrong(self) -> bool:
        """Whether waiting does not help, because the address must be changed."""
        return self in {Health.FOREIGN, Health.LOOP}

    @property
    def routes(self) -> bool:
        """Whether the server loads and unloads models, each of which is an engine."""
        return self in {Health.ROUTER, Health.SWAPPER}

    @property
    def unlike_ours(self) -> bool:
        """Whether a request may reach another server than llama-server, there or behind llama-swap."""
        return self in {Health.FOREIGN, Health.SWAPPER}


# The rest of a sentence that begins with an engine's address.
SAID: Final[Mapping[Health, str]] = {
    Health.OK: "is up",
    Health.LOADING: "is still loading its model",
    Health.SLEEPING: "sleeps",
    Health.ROUTER: "is a router",
    Health.SWAPPER: "is llama-swap",
    Health.UNLOADED: "is not loaded",
    Health.DOWN: "does not answer",
    Health.SILENT: "does not answer in time",
    Health.UNASKED: "cannot be asked: no file descriptor is left here (ulimit -n)",
    Health.FOREIGN: "is not a llama-server: something else answers there",
    Health.LOOP: "leads back to this sidecar",
}


PREFILL: Final = {  # fields of the body of a prefill
    "n_predict": 0,
    "cache_prompt": True,
    "temperature": 0,
    "stream": True,
    "return_progress": True,
    "response_fields": [  # of the last event only
        *("timings/prompt_n", "timings/cache_n", "timings/prompt_ms", "tokens_cached", "id_slot")
    ],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """The cost of one prefill, in tokens, by the engine's own count."""

    computed: int
    cached: int
    held: int  # tokens in the slot afterwards
    slot: SlotId
    seconds: float = 0.0  # of computing, without the time in the engine's queue
    cuts: tuple[int, ...] | None = None  # where batches ended, in tokens of the prompt; None: not reported


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """A slot's state was written to a file. T3: the file is whole only if its size is `written`."""

    tokens: int
    written: int  # bytes
    seconds: float  # in which all slots were blocked, without the time in the engine's queue


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreResult:
    """A file's state was loaded into a slot.

    If `read` is below the file's size, the engine has not loaded the file's checkpoints.
    """

    tokens: int
    read: int  # bytes
    seconds: float  # in which all slots were blocked, without the time in the engine's queue


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


def media_marker(props: Mapping[str, Any]) -> str:
    """Return the text that marks an image in a prompt, by the answer of /props; "" if images are refused."""
    modalities = props.get("modalities")
    sees = isinstance(modalities, dict) and modalities.get("vision") is True
    return str(props.get("media_marker") or "") if sees else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """The tokens that may follow a prompt."""

    odds: Odds
    held: int  # tokens in the slot afterwards
    slot: SlotId
    cuts: tuple[int, ...] | None = None  # where batches ended, in tokens of the prompt; None: not reported


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """The likeliest tokens at each step after a prompt, the best first."""

    steps: tuple[Odds, ...]
    held: int  # tokens in the slot afterwards
    slot: SlotId


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAnswer:
    """How fast an engine generates."""

    token_seconds: float
    held: int  # tokens in the slot afterwards


def lora_field(scales: Scales | None) -> dict[str, Any]:
    """Return the field of a body that asks for these LoRA scales; empty for None: the engine's own scales."""
    return {} if scales is None else {"lora": [{"id": at, "scale": scale} for at, scale in scales]}


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
    """Why snapshots do not work with this engine."""

    OFF = "off"
    NO_FOLDER = "no_folder"
    NOT_SHARED = "not_shared"
    UNREADABLE = "unreadable"
    UNKNOWN = "unknown"
    REFUSED = "refused"
    CUT = "cut"
    BUSY = "busy"
    UNCERTAIN = "uncertain"


# The problem, and what to do.
NO_FILES: Final[Mapping[Why, tuple[str, str]]] = {
    Why.OFF: (
        "The engine does not save slots.",
        "Add --slot-save-path, with the folder of Slotkeeper's --slot-dir.",
    ),
    Why.NO_FOLDER: ("The folder does not exist.", "Make it, or mount its volume."),
    Why.NOT_SHARED: (
        "The files that the engine saves do not appear in the folder.",
        "Its --slot-save-path and our --slot-dir must be the same folder of the same disk.",
    ),
    Why.UNREADABLE: (
        "The files that the engine saves cannot be read or removed here.",
        "Run both as the user who owns the folder.",
    ),
    Why.CUT: ("The file is smaller than the engine reports.", "Make room in the folder."),
    Why.UNKNOWN: ("Its slot files have a format that Slotkeeper does not know.", "Use another build."),
    Why.REFUSED: (
        "The engine could not save a slot.",
        "Check the room in the folder, and the engine's log.",
    ),
    Why.UNCERTAIN: (
        "The engine does not list its LoRA adapters, so which snapshots fit it is not known.",
        "Use another build.",
    ),
    Why.BUSY: ("No slot became idle, so none could be saved.", "Try again when the engine is less busy."),
}


class NoFilesError(Exception):
    """Snapshots do not work with this engine. The text says why and what to do."""

    def __init__(self, why: Why, detail: str = "") -> None:
        what, self.do = NO_FILES[why]
        self.what = f"{what.removesuffix('.')} ({detail})." if detail else what
        super().__init__(f"{self.what} {self.do}")
        self.why = why
