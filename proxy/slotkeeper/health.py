"""`slotkeeper health`: is a running sidecar ready, or at least alive."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import httpx

from slotkeeper.asking import admin_port, strange
from slotkeeper.terminal.out import complain

ADVICE: Final = "`slotkeeper doctor --upstream URL` looks at one."


async def health(*, admin: str | None, live: bool, ca: Path | None = None) -> int:
    """0 if it is, 1 with a sentence on standard error if not. Probes need no token."""
    async with admin_port(admin, None, ca=ca) as port:
        try:
            answer = await port.client.get("/livez" if live else "/readyz")
        except httpx.HTTPError as error:
            return _no(str(port.unreached(error)))
    if not answer.headers.get("Content-Type", "").startswith("text/plain"):
        return _no(str(strange(answer)))
    if answer.is_success:
        return 0
    said = answer.text.strip()
    return _no(f"{said}. {ADVICE}" if said.startswith("no engine") else said)


def _no(why: str) -> int:
    complain("health", why)
    return 1
