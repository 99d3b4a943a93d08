"""LoRA adapters: the set that a state was computed with.

Keys and values that one adapter has made are wrong for any other, and for other scales of it. The engine
keeps them apart only in part (engine.md T12): it empties a slot for a request that names other adapters than
the slot's last one, but not for a request that names none, and not after `POST /lora-adapters`. Its RAM cache
and its slot files know nothing of adapters.

So the set is a part of the space of every sequence of tokens, beside the namespace: no slot, branch, file or
message of one set is found for another. What else must be done is the same as for namespaces (`en_route`),
from the moment at which an engine has worked with a second set (`EngineShadow.mixed`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

from slotkeeper.scheduler.types import EngineId

BASE: Final = "base"  # the set of an engine with adapters of which none is in use
UNSURE: Final = "?"  # the set may have changed before a task began, or after
SEPARATOR: Final = "|"  # no namespace has it

Scales = tuple[tuple[int, float], ...]  # what a request asks for: an adapter's number, and its scale


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter that an engine has loaded, in the order of GET /lora-adapters."""

    name: str  # a digest of its file, so that two engines with the same file agree
    scale: float  # for requests that name no adapters


def single(scale: float) -> float:
    """Return the scale as the engine has it: a 32-bit float."""
    return array("f", [scale])[0]


def scales_in(named: Any) -> Scales | None:
    """Return the scales in a body's field `lora`, as the engine reads it; none if it is empty (T12)."""
    if not isinstance(named, list) or not named:
        return None
    entries = [entry if isinstance(entry, dict) else {} for entry in named]
    scales = {int(_number(entry.get("id"), -1)): _number(entry.get("scale"), 0.0) for entry in entries}
    return tuple(sorted(scales.items()))


def _number(value: Any, otherwise: float) -> float:
    """Return the value, or what the engine takes for a value of another type."""
    known = isinstance(value, bool | int | float) and isfinite(value)
    return float(value) if known else otherwise


def set_of(adapters: Sequence[Adapter], asked: Scales | None = None) -> str:
    """Return the name of the set with which a request is computed; "" for an engine without adapters.

    `asked`: the request's own scales. Adapters that it does not name then count as 0, and numbers that the
    engine does not have as nothing.
    """
    if not adapters:
        return ""
    own = None if asked is None else dict(asked)
    scales = [adapter.scale if own is None else own.get(at, 0.0) for at, adapter in enumerate(adapters)]
    used = sorted(
        f"{adapter.name}*{single(scale):.9g}"
        for adapter, scale in zip(adapters, scales, strict=True)
        if single(scale)
    )
    return ",".join(used) or BASE


def scales_of(adapters: Sequence[Adapter], name: str) -> Scales:
    """Return the scales with which a request of ours asks for the set of this name.

    Raises ValueError if the engine does not have its adapters.
    """
    wanted = [] if name in {"", BASE} else [part.rpartition("*") for part in name.split(",")]
    left = {at: adapter.name for at, adapter in enumerate(adapters)}
    found: dict[int, float] = {}
    for adapter, _, scale in wanted:
        at = next((at for at, known in left.items() if known == adapter), None)
        if at is None:
            raise ValueError(f"this engine has no adapter {adapter}")
        del left[at]
        found[at] = float(scale)
    return tuple((at, found.get(at, 0.0)) for at in range(len(adapters)))


# -- spaces ----------------------------------------------------------------------------------------------


def space_of(namespace: str, adapters: str) -> str:
    """Return the space of a namespace's states under a set of adapters."""
    return f"{namespace}{SEPARATOR}{adapters}" if adapters else namespace


def namespace_in(space: str) -> str:
    return space.partition(SEPARATOR)[0]


def set_in(space: str) -> str:
    return space.partition(SEPARATOR)[2]


# -- what happens to the adapters of an engine that runs (`adapter_change`) ---------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptersChange:
    """A client of ours is about to change an engine's adapters: until `AdaptersSeen` nothing begins there."""

    at: float
    engine: EngineId


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptersSeen:
    """GET /lora-adapters, as the engine answered it; None: it did not. `asked` is when that went out.

    `announced`: it ends an `AdaptersChange`; `exact`: whatever ran meanwhile had begun before that.
    """

    at: float
    asked: float
    engine: EngineId
    adapters: tuple[Adapter, ...] | None
    announced: bool = False
    exact: bool = False
