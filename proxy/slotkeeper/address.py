"""Where a port listens: HOST:PORT."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final

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
