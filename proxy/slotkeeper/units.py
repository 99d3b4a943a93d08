"""Values in the form in which people write them: sizes, lists, misspelt names, HOST:PORT, server URLs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from ipaddress import ip_address, ip_network
from typing import Any, Final
from urllib.parse import urlsplit

from pydantic import ByteSize

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

WILDCARDS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - asked, not bound


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
        host, colon, port = text.rpartition(":")
        if not colon or not port.isdigit() or int(port) > 65535:
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
    """The same text, if it is a host name. Raises ValueError."""
    if not re.fullmatch(r"[A-Za-z0-9._-]+", text):
        raise ValueError(f"{text!r} is not a host name; write it without scheme and port")
    return text


def network(text: str) -> str:
    """The same text, if it is an IP address or a network. Raises ValueError."""
    try:
        ip_network(text, strict=False)
    except ValueError:
        raise ValueError(f"{text!r} is not an address; write it as in 10.0.0.7 or 10.0.0.0/8") from None
    return text
