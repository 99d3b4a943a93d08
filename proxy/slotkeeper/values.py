"""Values in the form in which people write them: sizes, lists, misspelt names, HOST:PORT, URLs, engines."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError

# difflib's ratio: `listn` and `log_levle` are close enough to the names meant, `model` to `slot_dir` is not.
CLOSE: Final = 0.7


def in_words(value: Any) -> str:
    """Format a value as a person would write it in a setting; "" for None."""
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case ByteSize():
            return _size(value)
        case tuple():
            return ", ".join(value)
        case _:
            return str(value)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known name that was probably meant; "" if none is close."""
    return next(iter(get_close_matches(word, list(known), n=1, cutoff=CLOSE)), "")


def meant(word: str, known: Iterable[str]) -> str:
    """Return the hint that ends a message about an unknown name; "" if no known name is close."""
    name = nearest(word, known)
    return f"; did you mean {name}?" if name else ""


_UNITS: Final = {
    f"{prefix}{tail}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for tail, base in (("iB", 1024), ("B", 1000))
}


def _size(count: int) -> str:
    """Format bytes in the unit that gives the shortest exact text: it parses back to the same number."""
    exact = [f"{count // unit}{name}" for name, unit in _UNITS.items() if count and not count % unit]
    return min([*exact, str(count)], key=len)


# -- addresses -------------------------------------------------------------------------------------------

WILDCARDS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared, not bound

_PORT: Final = re.compile(r"[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class Address:
    """The address on which a port listens: HOST:PORT."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def reached(self) -> Address:
        """The address for clients on this machine: loopback if the port listens on every address."""
        return Address(WILDCARDS.get(self.host, self.host), self.port)

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse HOST:PORT; an empty HOST means every address. Raises ValueError."""
        host, colon, port = text.rpartition(":")
        if not colon or not _PORT.fullmatch(port) or int(port) > 65535:
            raise ValueError(f"{text!r} is not HOST:PORT")
        return cls(host.strip("[]") or "0.0.0.0", int(port))  # noqa: S104 - ":8080" means every address


def base_of(url: str) -> str:
    """Return a server's URL without a trailing slash or /v1, to join it with paths. Raises ValueError.

    People often write .../v1, as clients want it; the paths of requests already begin with /v1.
    """
    base = url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(base)
        good = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:  # the port is not a number
        good = False
    if not good or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is not a URL; write http://HOST:PORT")
    return base


def host_name(text: str) -> str:
    """Return the text unchanged if it is a host name. Raises ValueError."""
    if not re.fullmatch(r"[A-Za-z0-9._-]+", text):
        raise ValueError(f"{text!r} is not a host name; write it without scheme and port")
    return text


def network(text: str) -> str:
    """Return the text unchanged if it is an IP address or a network. Raises ValueError."""
    try:
        ip_network(text, strict=False)
    except ValueError:
        raise ValueError(f"{text!r} is not an address; write it as in 10.0.0.7 or 10.0.0.0/8") from None
    return text


# -- engines as the user names them: NAME=URL, and the tables of a file ---------------------------------

LARGEST: Final = 2**20  # most bytes of the file
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
        if named := _NAMED.fullmatch(text.strip()):
            return cls(named[1], base_of(named[2]))
        base = base_of(text)
        return cls(base, base)


def checked(upstreams: Iterable[NamedUpstream]) -> tuple[NamedUpstream, ...]:
    """Return all engines. Raises UpstreamsError if there are none, or two have one name or address."""
    found = tuple(upstreams)
    names, bases = ({getattr(one, part) for one in found} for part in ("name", "base"))
    if not found or len(bases) < len(found):
        raise UpstreamsError("name at least one engine, and each only once")
    if len(names) < len(found):
        raise UpstreamsError("two engines have one name; give each its own")
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
