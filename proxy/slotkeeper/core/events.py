"""What happens to us. Every event carries the time at which it happened; the core has no clock."""

from __future__ import annotations

from dataclasses import dataclass

from slotkeeper.core.observed import SlotView
from slotkeeper.core.tokens import Tokens
from slotkeeper.core.traits import EngineTraits
from slotkeeper.core.types import ClientId, EngineId, RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A request that will take a slot. Its tokens follow in `Rendered`."""

    at: float
    request: RequestId
    client: ClientId
    pinnable: bool = True  # whether the route honours id_slot
    rendered: bool = True  # whether `Rendered` will follow
    id_slot: int | None = None  # the client's own choice
    copies: int = 1  # n: slots it takes
    outline: tuple[bytes, ...] = ()
    brief: bool = False  # at most a hundred tokens: finding its prefix costs more than it saves
    resumable: bool = False  # X-Conversation-Id: the engine goes on after a disconnect
    bypass: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """The request's exact prompt, or None when it cannot be known."""

    at: float
    request: RequestId
    prompt: Tokens | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """A `Plant` effect ended. `computed` tokens were evaluated for it; None if it failed."""

    at: float
    request: RequestId
    computed: int | None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """The client left, or the answer broke off: the engine may still be at work on it."""

    at: float
    request: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyKnown:
    """The ids of prompt and reply together, as the next turn will send them."""

    at: float
    request: RequestId
    tokens: Tokens


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLost:
    at: float
    engine: EngineId


Event = (
    Arrived
    | Rendered
    | Planted
    | Started
    | Finished
    | Gone
    | ReplyKnown
    | Observed
    | ObserveFailed
    | EngineUp
    | EngineLost
)
