"""Engines as the user names them: NAME=URL, and the tables of a file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slotkeeper.values import base_of

MAX_ENGINES: Final = 8  # of one sidecar: a decision among more blocks the event loop for too long
LARGEST: Final = 2**20  # most bytes of the file
AUTO: Final = "auto"  # in place of an address: the engine of this machine (engine/nearby.py)
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
_NAMED: Final = re.compile(rf"({NAME.pattern})\s*=(.*)", re.DOTALL)


class UpstreamsError(ValueError):
    """The named engines cannot be used; the message says what to do."""


class _UpstreamEntry(BaseModel):
    """The table of one engine in the file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    url: str
    labels: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NamedUpstream:
    """One engine. If the user gives no name, its address is the name."""

    name: str
    base: str  # its URL, to which paths are appended
    labels: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return self.base if self.name == self.base else f"{self.name}={self.base}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `NAME=URL`, or a URL. Raises ValueError."""
        if text.strip() == AUTO:
            raise UpstreamsError(f"{AUTO} finds one engine of this machine: name no other beside it")
        if named := _NAMED.fullmatch(text.strip()):
            return cls(named[1], base_of(named[2]))
        base = base_of(text)
        return cls(base, base)


def checked(upstreams: Iterable[NamedUpstream]) -> tuple[NamedUpstream, ...]:
    """Return all engines.

    Raises UpstreamsError if there are none or more than `MAX_ENGINES`, or if two have one name or address.
    """
    found = tuple(upstreams)
    names, bases = ({getattr(one, part) for one in found} for part in ("name", "base"))
    if not found or len(bases) < len(found):
        raise UpstreamsError("name at least one engine, and each only once")
    if len(names) < len(found):
        raise UpstreamsError("two engines have one name; give each its own")
    if len(found) > MAX_ENGINES:
        raise UpstreamsError(
            f"one sidecar serves at most {MAX_ENGINES} engines, not {len(found)}; "
            "put a sidecar beside each engine, and a gateway in front: slotkeeper docs scaling"
        )
    return found


def read_table(path: Path) -> tuple[NamedUpstream, ...]:
    """Return the engines of a file, in its order. Raises UpstreamsError."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise UpstreamsError(f"{path} is larger than {LARGEST >> 20} MiB")
        tables = tomllib.loads(data.decode())
    except OSError as error:
        raise UpstreamsError(f"{path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UpstreamsError(f"{path} is not valid TOML: {error}") from None
    try:
        return checked(_upstream(name, table) for name, table in tables.items())
    except ValueError as error:
        raise UpstreamsError(f"{path}: {error}") from None


def _upstream(name: str, table: Any) -> NamedUpstream:
    if not NAME.fullmatch(name):
        raise UpstreamsError(
            f"{name!r} is not a valid name; use letters, digits, dots and dashes, at most 40"
        )
    if not isinstance(table, Mapping):
        raise UpstreamsError(f'{name} is not a table; write [{name}] and url = "http://HOST:PORT" below it')
    try:
        found = _UpstreamEntry.model_validate(table)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise UpstreamsError(f"{name}.{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from None
    try:
        return NamedUpstream(name, base_of(found.url), tuple(found.labels.items()))
    except ValueError as error:
        raise UpstreamsError(f"{name}.url: {error}") from None
