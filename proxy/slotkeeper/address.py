"""Where a port listens, HOST:PORT, and where a server is, as a URL."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

WILDCARDS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - asked, not bound


@dataclass(frozen=True, slots=True)
class Address:
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
        """As this machine reaches it: what listens on every address is asked on loopback."""
        return Address(WILDCARDS.get(self.host, self.host), self.port)

    @classmethod
    def parse(cls, text: str) -> Address:
        host, colon, port = text.rpartition(":")
        if not colon or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"{text!r} is not HOST:PORT")
        return cls(host.strip("[]") or "0.0.0.0", int(port))  # noqa: S104 - ":8080" means every address


def base_of(url: str) -> str:
    """A server's URL as it is put in front of paths. Raises ValueError.

    Clients are often given .../v1, and so are we: the paths that come have it already.
    """
    base = url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(base)
        good = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number
        good = False
    if not good or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is not a URL; write http://HOST:PORT")
    return base
