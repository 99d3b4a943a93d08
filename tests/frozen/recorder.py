"""Records what goes into the scheduler and what comes out, in a form that only a decision changes.

`Placement.on` is the only door, and there is no clock behind it, so its events and effects are everything.
The form does not depend on the names of tests, of classes and fields (see `names`), on the scheduler's own
names for idle work, on the order of sets, on addresses, on the version of Python or the last digits of a
float.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from hashlib import blake2b
from math import isfinite
from typing import Any, Final
from unittest.mock import patch

import orjson

from frozen.names import BEFORE
from slotkeeper.scheduler.effects import Effect
from slotkeeper.scheduler.events import Arrived, Event
from slotkeeper.scheduler.placement import Placement
from slotkeeper.scheduler.prompts.tokens import Tokens

# Of a float: a sum has other last digits from Python 3.12 on, a logarithm in another C library.
DIGITS: Final = 7
LONGEST_BYTES: Final = 8  # longer ones are replaced by their digest
KIND: Final = "is"  # the key of a class's name
NEUTRAL: Final[tuple[Any, ...]] = (None, False, 0, "", (), frozenset(), {})
REQUESTS: Final = ("request", "other")  # fields that hold the id of a request or of a piece of idle work


def digest(content: bytes) -> str:
    return blake2b(content, digest_size=LONGEST_BYTES).hexdigest()


class Recording:
    """The events of one script, in order, each with the scheduler's effects: one line of JSON for each."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.effects = Counter[str]()
        self._placements: list[Placement] = []  # kept, so that none gets the address of another
        self._asked: set[str] = set()
        self._own: dict[str, str] = {}

    @property
    def digest(self) -> str:
        return digest(b"\n".join(self.lines))

    def took(self, placement: Placement, event: Event, effects: list[Effect]) -> None:
        if not any(placement is known for known in self._placements):
            self._placements.append(placement)
        number = next(n for n, known in enumerate(self._placements) if known is placement)
        if isinstance(event, Arrived):
            self._asked.add(event.request)
        done = [self._form(effect) for effect in effects]
        self.effects.update(effect[KIND] for effect in done)
        line = [number, self._form(event), done] if number else [self._form(event), done]
        self.lines.append(orjson.dumps(line, option=orjson.OPT_SORT_KEYS))

    # -- the form ------------------------------------------------------------------------------------

    def _form(self, value: Any) -> Any:
        """Return a value as JSON. Raises TypeError for what has no form that lasts."""
        match value:
            case Enum():
                return self._form(value.value)
            case None | bool() | int() | str():
                return value
            case float():
                return rounded(value)
            case bytes():
                return value.hex() if len(value) <= LONGEST_BYTES else digest(value)
            case Tokens():
                where = f" of {value.space}" if value.space else ""
                return f"{len(value)} tokens {digest(value.packed)}{where}"
            case Mapping():
                return {str(self._form(key)): self._form(each) for key, each in value.items()}
            case AbstractSet():
                return sorted((self._form(each) for each in value), key=orjson.dumps)
            case tuple() | list():
                return [self._form(each) for each in value]
        if not is_dataclass(value):
            raise TypeError(f"{type(value).__name__} has no form that lasts: give it one in {__name__}")
        return self._object(value)

    def _object(self, value: Any) -> dict[str, Any]:
        kind = type(value)
        found: dict[str, Any] = {}
        for name, default in shape(kind):  # type: ignore[arg-type]  # a class can be hashed
            held = getattr(value, name)
            if held == default and type(held) is type(default):
                continue
            found[name] = self._named(held) if name in REQUESTS and held is not None else self._form(held)
        before = BEFORE.get(kind.__name__)
        was, shown = before(found) if before else (kind.__name__, found)
        return {KIND: was, **shown}

    def _named(self, request: str) -> str:
        """Return the id of a request; the scheduler's own ids are numbered in order of their appearance."""
        return request if request in self._asked else self._own.setdefault(request, f"own {len(self._own)}")


@cache
def shape(kind: type[Any]) -> tuple[tuple[str, Any], ...]:
    """Return the fields of a class, each with the value that is left out: its default, if that is neutral.

    So a new field, which changes nothing until it is used, changes no digest.
    """
    return tuple((field.name, _neutral(field)) for field in fields(kind))


def _neutral(field: Field[Any]) -> Any:
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    return default if any(default == each and type(default) is type(each) for each in NEUTRAL) else MISSING


def rounded(value: float) -> float | int | str:
    if not isfinite(value):
        return str(value)
    near = float(f"{value:.{DIGITS}g}")
    return int(near) if near.is_integer() else near


@contextmanager
def recorded() -> Iterator[Recording]:
    """Record all schedulers that get events inside the block."""
    recording, on = Recording(), Placement.on

    def watched(placement: Placement, event: Event) -> list[Effect]:
        effects = on(placement, event)
        recording.took(placement, event, effects)
        return effects

    with patch.object(Placement, "on", watched):
        yield recording
