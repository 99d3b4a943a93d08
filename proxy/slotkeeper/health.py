"""`slotkeeper health`: is a running sidecar ready, or at least alive."""

from __future__ import annotations

import httpx

from slotkeeper.asking import admin_port
from slotkeeper.terminal.out import complain


async def health(*, admin: str | None, live: bool) -> int:
    """0 if it is, 1 with a sentence on standard error if not. Probes need no token."""
    async with admin_port(admin, None) as port:
        try:
            answer = await port.client.get("/livez" if live else "/readyz")
        except httpx.HTTPError as error:
            return _no(str(port.unreached(error)))
    return 0 if answer.is_success else _no(answer.text.strip())


def _no(why: str) -> int:
    complain("health", why)
    return 1
