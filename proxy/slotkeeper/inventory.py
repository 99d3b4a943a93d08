"""The snapshots of a sidecar that runs, by its admin port, or of a folder while none runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import httpx
import orjson

from slotkeeper.asking import ANSWER_SECONDS, AdminClient, AskedError, admin_port, refusal
from slotkeeper.config import UsageError
from slotkeeper.scheduler.snapshots import SnapshotId
from slotkeeper.store import names
from slotkeeper.store.store import Store
from slotkeeper.store.trouble import StoreError, Trouble
from slotkeeper.web.snapshots import overview, verified

ELSEWHERE: Final = "Name its admin port by --admin, or its folder by --slot-dir."


class Inventory(Protocol):
    """A store of snapshots, wherever it is. Documents are those of the admin port. Raises AskedError."""

    async def overview(self) -> dict[str, Any]: ...

    def verify(self, ids: Sequence[str]) -> AsyncIterator[dict[str, Any]]:
        """Without ids all that are there by then."""
        ...

    async def remove(self, snapshot: str) -> None: ...


# -- of a sidecar that runs ----------------------------------------------------------------------------


class Running:
    def __init__(self, port: AdminClient) -> None:
        self._port = port

    async def overview(self) -> dict[str, Any]:
        return dict(await self._port.get("/api/snapshots"))

    async def verify(self, ids: Sequence[str]) -> AsyncIterator[dict[str, Any]]:
        patient = httpx.Timeout(ANSWER_SECONDS, read=None)
        body = {"ids": list(ids)} if ids else None
        try:
            async with self._port.client.stream(
                "POST", "/api/snapshots/verify", json=body, timeout=patient
            ) as answer:
                if not answer.is_success:
                    await answer.aread()
                    raise refusal(answer)
                async for line in answer.aiter_lines():
                    yield orjson.loads(line)
        except httpx.HTTPError as error:
            raise self._port.unreached(error) from error

    async def remove(self, snapshot: str) -> None:
        await self._port.asked("DELETE", f"/api/snapshots/{snapshot}")


@asynccontextmanager
async def running(url: str | None, token: str | None, ca: Path | None = None) -> AsyncIterator[Running]:
    async with admin_port(url, token, ELSEWHERE, ca=ca) as port:
        yield Running(port)


# -- of a folder, while no sidecar runs ----------------------------------------------------------------


class Folder:
    def __init__(self, store: Store, notes: Sequence[str]) -> None:
        """`notes` are what was cleared away when it was opened."""
        self._store = store
        self._notes = notes

    async def overview(self) -> dict[str, Any]:
        return overview(self._store) | {"notes": list(self._notes)}

    async def verify(self, ids: Sequence[str]) -> AsyncIterator[dict[str, Any]]:
        for id_ in ids or [kept.id for kept in self._store.listing()]:
            yield await verified(self._store, SnapshotId(id_))

    async def remove(self, snapshot: str) -> None:
        try:
            await self._store.forget(SnapshotId(snapshot))
        except StoreError as error:
            raise AskedError(str(error)) from error


@asynccontextmanager
async def folder(hot: Path, cold: Path | None) -> AsyncIterator[Folder]:
    """Opened as a sidecar would: it takes the folder's lock, and what is unfinished there is swept away."""
    for flag, path in (("--slot-dir", hot), ("--cold-dir", cold)):
        if path and not (path / names.LOCK).is_file():
            raise UsageError(f"{flag}: no sidecar has ever kept snapshots in {path}")
    store = Store(hot, cold)
    try:
        opened = await store.open()
        yield Folder(store, opened.notes)
    except StoreError as error:
        hint = f"A sidecar keeps its snapshots in {hot}: leave --slot-dir out, to ask it on its admin port."
        raise AskedError(hint if error.trouble is Trouble.IN_USE else str(error)) from error
    finally:
        await store.close()
