"""What `serve` and `up` tell a person at a terminal once they listen: where to point what, and what next."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final, TextIO

from slotkeeper.address import Address
from slotkeeper.settings import Settings

USUAL_ADMIN: Final = str(Settings.model_fields["admin_listen"].default)


def greeter(settings: Settings) -> Callable[[str, str], None]:
    """To be told HOST:PORT of both ports, as bound. Says nothing where no person reads."""

    def greet(data: str, admin: str) -> None:
        if out := terminal(settings.log_format):
            print(
                *greeting(data, admin, settings.api_prefix, settings.scheme), sep="\n", file=out, flush=True
            )

    return greet


def terminal(log_format: str) -> TextIO | None:
    """Standard output or error, whichever is a terminal. None where the lines would stand among JSON."""
    if log_format == "json" and sys.stderr.isatty():
        return None
    return next((stream for stream in (sys.stdout, sys.stderr) if stream.isatty()), None)


def greeting(data: str, admin: str, api_prefix: str = "", scheme: str = "http") -> list[str]:
    """Three lines."""
    agents = f"{scheme}://{Address.parse(data).reached}{api_prefix}"
    watched = str(Address.parse(admin).reached)
    where = "" if (watched, scheme) == (USUAL_ADMIN, "http") else f" --admin {scheme}://{watched}"
    return [
        f"Agents:     {agents}/v1 or {agents}, as the client wants it; llama-server's web UI is at {agents}/",
        f"Dashboard:  {scheme}://{watched}/",
        f"Next:       slotkeeper why{where}   (the last requests, and why each was computed)",
    ]
