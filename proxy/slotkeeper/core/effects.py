"""What the core wants done. The driver does it and reports the outcome as an event."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from slotkeeper.core.tokens import Tokens
from slotkeeper.core.types import EngineId, Place, Reason, RequestId


class Purpose(StrEnum):
    TOUCH = "touch"  # one token, so that the engine loads from its RAM cache (T6)
    STEER = "steer"  # the prompt itself, where the engine will then look for it (T5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """Prefill `tokens` in a slot before the request goes there; answered by `Planted`."""

    request: RequestId
    place: Place
    tokens: Tokens
    purpose: Purpose


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Send the request on. `slot` is None where it goes unpinned."""

    request: RequestId
    engine: EngineId
    slot: int | None
    reason: Reason
    pin: bool  # whether id_slot must be written into the body


@dataclass(frozen=True, slots=True, kw_only=True)
class Observe:
    """Ask GET /slots after `delay` seconds; answered by `Observed` or `ObserveFailed`."""

    engine: EngineId
    delay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one request cost, from the engine's figures, once all of it is known."""

    request: RequestId
    reason: Reason
    slot: int | None
    prompt_tokens: int | None
    cached: int | None
    predicted: int | None  # what we said `cached` would be
    oracle: int | None  # tokens a perfect cache would have computed
    exact: bool | None  # whether our count of prompt tokens was the engine's; None: no figure to compare
    planted: int  # tokens computed by our own prefills for it


Effect = Plant | Forward | Observe | Report
