"""LoRA adapters: the adapter set with which a state was computed.

Keys and values computed with one adapter are wrong for any other, and for other scales. The engine separates
them only in part (engine.md T12): it empties a slot for a request that names other adapters than the slot's
last request, but not for a request that names none, and not after `POST /lora-adapters`. Its RAM cache and
its slot files do not record adapters.

So the space of every sequence of tokens contains the set, beside the namespace: a slot, branch, file or
message of one set is never found for another. Once an engine has used a second set (`EngineShadow.mixed`),
the same precautions apply as for namespaces (`spaces`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

BASE: Final = "base"  # the set of an engine with adapters of which none is in use
UNSURE: Final = "?"  # the set may have changed before or after the task began
SEPARATOR: Final = "|"  # no namespace contains it

Scales = tuple[tuple[int, float], ...]  # of a request: number and scale of each adapter


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter that an engine has loaded, in the order of GET /lora-adapters."""

    name: str  # a digest of the adapter's file, so that engines with the same file agree
    scale: float  # for requests that name no adapters


def single(scale: float) -> float:
    """Return the scale rounded to a 32-bit float, as the engine stores it."""
    return array("f", [scale])[0]


def scales_in(named: Any) -> Scales | None:
    """Return the scales in a body's field `lora` as the engine reads it; None if it is empty (T12)."""
    if not isinstance(named, list) or not named:
        return None
    entries = [entry if isinstance(entry, dict) else {} for entry in named]
    scales = {int(_number(entry.get("id"), -1)): _number(entry.get("scale"), 0.0) for entry in entries}
    return tuple(sorted(scales.items()))


def _number(value: Any, otherwise: float) -> float:
    """Return the value; if it is no finite number, `otherwise`, which the engine uses in its place."""
    known = isinstance(value, bool | int | float) and isfinite(value)
    return float(value) if known else otherwise


def set_of(adapters: Sequence[Adapter], asked: Scales | None = None) -> str:
    """Return the name of the set with which a request is computed; "" for an engine without adapters.

    `asked`: the request's own scales. Adapters that they do not name then have scale 0, and adapter numbers
    that the engine does not have are ignored.
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
    """Return the scales with which one of our own requests selects the set of this name.

    Raises ValueError if the engine does not have the set's adapters.
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
    """Return the space of a namespace's states under an adapter set."""
    return f"{namespace}{SEPARATOR}{adapters}" if adapters else namespace


def salted(hash_chain: tuple[bytes, ...], space: str, before: str = "") -> tuple[bytes, ...]:
    """Return the digests of a space, in place of those of the one `before`."""
    if space == before:
        return hash_chain
    salt, unsalted = space.encode(), len(before.encode())
    return tuple(salt + digest[unsalted:] for digest in hash_chain)


def namespace_in(space: str) -> str:
    return space.partition(SEPARATOR)[0]


def set_in(space: str) -> str:
    return space.partition(SEPARATOR)[2]
