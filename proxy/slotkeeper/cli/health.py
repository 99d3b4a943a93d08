"""`slotkeeper health`: whether a running sidecar is ready."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import httpx

from slotkeeper.cli.admin_client import admin_port, strange

ADVICE: Final = "`slotkeeper doctor --upstream URL` examines an engine."


async def health(*, admin: str | None, live: bool, ca: Path | None = None) -> int:
    """Return 0 if the sidecar is ready; else print why not on standard error and return 1.

    `live`: only ask whether its process is alive. Probes need no token.
    """
    async with admin_port(admin, None, ca=ca, probes=True) as port:
        try:
            answer = await port.client.get("/livez" if live else "/readyz")
        except httpx.HTTPError as error:
            return _no(str(port.unreached(error)))
    if not answer.headers.get("Content-Type", "").startswith("text/plain"):
        return _no(str(strange(answer)))
    if answer.is_success:
        return 0
    reason = answer.text.strip()
    return _no(f"{reason}. {ADVICE}" if reason.startswith("no engine") else reason)


def _no(why: str) -> int:
    from slotkeeper.observe.standard_error import complain  # noqa: PLC0415 - its counter takes long to load

    complain("health", why)
    return 1
