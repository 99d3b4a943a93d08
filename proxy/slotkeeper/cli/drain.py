"""`slotkeeper drain` and `slotkeeper undrain`: take an engine out of use while the others serve."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

from slotkeeper.cli.admin_client import AdminClient, AskedError, admin_port
from slotkeeper.cli.terminal import complain

LOOK_SECONDS: Final = 0.5  # between two requests for the engine's state


async def drain(name: str, *, admin: str | None, token: str | None, ca: Path | None, wait: bool) -> int:
    """Ask the sidecar to drain an engine. With `wait`, return when nothing runs there any more."""
    try:
        async with admin_port(admin, token, ca=ca) as port:
            engine = await port.asked("POST", "/api/drain", json={"engine": name})
            if not engine["drained"] and wait:
                print(f"{engine['engine']} is draining: it gets no new requests; running answers end.")  # noqa: T201
                engine = await _drained(port, engine["engine"])
    except AskedError as error:
        complain("drain", str(error))
        return 1
    print(_said(engine))  # noqa: T201
    return 0


async def undrain(name: str, *, admin: str | None, token: str | None, ca: Path | None) -> int:
    """Ask the sidecar to use an engine again."""
    try:
        async with admin_port(admin, token, ca=ca) as port:
            engine = await port.asked("POST", "/api/undrain", json={"engine": name})
    except AskedError as error:
        complain("undrain", str(error))
        return 1
    print(f"{engine['engine']} is in use again.")  # noqa: T201
    return 0


async def _drained(port: AdminClient, name: str) -> dict[str, Any]:
    """Return the engine's state when it is drained.

    Raises AskedError if it is undrained or removed meanwhile.
    """
    while True:
        engines = (await port.get("/api/state"))["engines"]
        engine: dict[str, Any] | None = next((one for one in engines if one["engine"] == name), None)
        if engine is None or not engine["draining"]:
            raise AskedError(f"{name} is not being drained any more.")
        if engine["drained"]:
            return engine
        await asyncio.sleep(LOOK_SECONDS)


def _said(engine: dict[str, Any]) -> str:
    name = engine["engine"]
    if not engine["drained"]:
        return f"{name} is draining; `slotkeeper top` shows when it is drained."
    return f"{name} is drained: nothing runs there, and with snapshots, what its slots held is saved."
