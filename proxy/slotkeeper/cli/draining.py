"""`slotkeeper drain` and `slotkeeper undrain`: take an engine of a running sidecar out of use, and back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

from slotkeeper.cli.admin_client import AdminClient, AskedError, admin_port

LOOK_SECONDS: Final = 0.5  # between two requests for the state of an engine that is being drained


async def drain(name: str, *, admin: str | None, token: str | None, ca: Path | None, wait: bool) -> int:
    """Drain an engine; with `wait`, wait until nothing runs there any more. Returns the exit code."""
    try:
        async with admin_port(admin, token, ca=ca) as port:
            engine = await port.asked("POST", "/api/drain", json={"engine": name})
            if not engine["drained"] and wait:
                print(f"{engine['engine']} is draining: it gets no new requests; running answers end.")  # noqa: T201
                engine = await _drained(port, engine["engine"])
    except AskedError as error:
        return _failed("drain", error)
    print(_drain_state(engine))  # noqa: T201
    return 0


async def undrain(name: str, *, admin: str | None, token: str | None, ca: Path | None) -> int:
    """Use a drained engine again. Returns the exit code."""
    try:
        async with admin_port(admin, token, ca=ca) as port:
            engine = await port.asked("POST", "/api/undrain", json={"engine": name})
    except AskedError as error:
        return _failed("undrain", error)
    print(f"{engine['engine']} is in use again.")  # noqa: T201
    return 0


def _failed(command: str, error: AskedError) -> int:
    from slotkeeper.observe.standard_error import complain  # noqa: PLC0415 - its counter takes long to load

    complain(command, error)
    return 1


async def _drained(port: AdminClient, name: str) -> dict[str, Any]:
    """Wait until an engine is drained, and return its state.

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


def _drain_state(engine: dict[str, Any]) -> str:
    name = engine["engine"]
    if not engine["drained"]:
        return f"{name} is draining; `slotkeeper top` shows when it is drained."
    return f"{name} is drained: nothing runs there, and with snapshots, what its slots held is saved."
