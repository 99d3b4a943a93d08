"""Values in the form in which people write them: numbers, misspelt names, HOST:PORT, URLs.

Every command imports this module to read its arguments, so it needs no other packages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from ipaddress import ip_address, ip_network
from typing import Final
from urllib.parse import urlsplit

# pydantic's error type -> what is wrong and what to write instead; the value precedes this text.
PLAIN: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("byte_size", "byte_size_unit"),
        "is not a size; write it as a number of bytes, or as in 32GiB or 500MB",
    ),
    **dict.fromkeys(("float_parsing", "float_type"), "is not a number; write it as in 2.5"),
    **dict.fromkeys(
        ("int_parsing", "int_type", "int_from_float"), "is not a whole number; write it as in 500"
    ),
    **dict.fromkeys(("bool_parsing", "bool_type"), "is neither true nor false"),
}

# difflib's ratio: `listn` and `log_levle` are close enough to the names meant, `model` to `slot_dir` is not.
CLOSE: Final = 0.7


class UsageError(Exception):
    """A setting is wrong; the message says which one and what to do. Exit code 2."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known name that was probably meant; "" if none is close."""
    return next(iter(get_close_matches(word, list(known), n=1, cutoff=CLOSE)), "")


FIXED: Final = "its value is fixed now"
# Settings that releases up to 0.7.0 had, and what holds in their place. A variable of such a name would else
# be ignored silently, and the flag that is closest to it was not meant.
REMOVED_SETTINGS: Final[Mapping[str, str]] = {
    "all_bodies_bytes": "it follows from --max-body-bytes",
    "api_prefix": "give the engine's --api-prefix as the path of --upstream",
    "log_format": "logs are JSON except on a terminal",
    "max_connections_per_address": "it is half of --max-connections",
    "slot_actions": "clients' slot actions are refused where --namespaces are on, or with --keys-file",
    **dict.fromkeys(
        (
            "body_timeout",
            "engine_frozen_after",
            "head_timeout",
            "max_waiting",
            "max_waiting_per_client",
            "probe",
            "read_ahead_bytes",
            "read_ahead_total",
            "read_flags",
            "record_bytes",
            "save_pause",
            "swap_wait",
            "why_requests",
            "write_timeout",
        ),
        FIXED,
    ),
}


def removed(word: str) -> str:
    """Return the hint that ends a message about a setting that was removed; "" for any other name."""
    name = word.lstrip("-").removeprefix("no-").replace("-", "_").lower()
    return f"; it was removed: {REMOVED_SETTINGS[name]}" if name in REMOVED_SETTINGS else ""


def meant(word: str, known: Iterable[str]) -> str:
    """Return the hint that ends a message about an unknown name; "" if no known name is close."""
    name = nearest(word, known)
    return f"; did you mean {name}?" if name else ""


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


def server(text: str, flag: str) -> str:
    """Normalise a server's URL, given with or without /v1. Raises UsageError."""
    try:
        return base_of(text)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None


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
