"""`slotkeeper why`: why a request computed what it computed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final
from urllib.parse import quote

from rich.console import Console

from slotkeeper.asking import AdminClient, AskedError, admin_port
from slotkeeper.config import UsageError
from slotkeeper.terminal.account import account
from slotkeeper.terminal.figures import span
from slotkeeper.terminal.listed import requests
from slotkeeper.terminal.out import complain, say

SHORTEST: Final = 4  # letters at the end of an id that may stand for it


async def why(
    id_: str | None,
    out: Console,
    *,
    admin: str | None,
    token: str | None,
    last: int,
    repeated: bool,
    as_json: bool,
    ca: Path | None = None,
) -> int:
    """Print one request's account, or a list of the last ones. Returns 1 when it cannot be told.

    Raises UsageError.
    """
    if id_ is not None and repeated:
        raise UsageError("--repeated is for the list: leave the ID out")
    if id_ is not None and len(id_) < SHORTEST:
        raise UsageError(f"{id_!r} is too short: name at least the last {SHORTEST} letters of an ID")
    try:
        async with admin_port(admin, token, ca=ca) as port:
            if id_ is None:
                await _list(port, out, last=last, repeated=repeated, as_json=as_json)
            else:
                await _one(port, out, id_, as_json=as_json)
    except AskedError as error:
        complain("why", str(error))
        return 1
    return 0


async def _one(port: AdminClient, out: Console, id_: str, *, as_json: bool) -> None:
    document = await port.get(f"/api/requests/{quote(id_, safe='')}")
    if as_json:
        say(document)
    else:
        out.print(account(document, out.width, time.time()))


async def _list(port: AdminClient, out: Console, *, last: int, repeated: bool, as_json: bool) -> None:
    found = (await port.get("/api/requests", limit=last, **({"repeated": 1} if repeated else {})))["requests"]
    if as_json:
        for one in found:
            say(one)
    elif found:
        out.print(requests(found, out.width, time.time()))
    else:
        out.print(await _nothing(port, repeated=repeated))


async def _nothing(port: AdminClient, *, repeated: bool) -> str:
    """Why the list is empty."""
    state = await port.get("/api/state")
    if repeated and (await port.get("/api/requests", limit=1))["requests"]:
        return "None of the last requests computed tokens twice."
    if state["totals"]["requests"]:
        return "No request is kept: the sidecar runs with --why-requests 0."
    return f"No request has come yet: the sidecar began {span(state['uptime_seconds'])} ago."
