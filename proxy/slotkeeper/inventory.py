"""The snapshots of a sidecar that runs, by its admin port, or of a folder while none runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import httpx
import orjson

from slotkeeper.address import Address
from slotkeeper.config import UsageError, load
from slotkeeper.core.snapshots import SnapshotId
from slotkeeper.store import names
from slotkeeper.store.store import Store
from slotkeeper.store.trouble import StoreError, Trouble
from slotkeeper.web.snapshots import overview, verified

ANSWER_SECONDS: Final = 10.0  # for a list or a removal; verifying takes as long as reading does


class AskedError(Exception):
    """It cannot be done, and the text says why. Exit code 1."""


class Inventory(Protocol):
    """A store of snapshots, wherever it is. Documents are those of the admin port. Raises AskedError."""

    async def overview(self) -> dict[str, Any]: ...

    def verify(self, ids: Sequence[str]) -> AsyncIterator[dict[str, Any]]:
        """Without ids all that are there by then."""
        ...

    async def remove(self, snapshot: str) -> None: ...


# -- of a sidecar that runs ----------------------------------------------------------------------------


class Running:
    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def overview(self) -> dict[str, Any]:
        return dict(await self._asked("GET", "/api/snapshots"))

    async def verify(self, ids: Sequence[str]) -> AsyncIterator[dict[str, Any]]:
        patient = httpx.Timeout(ANSWER_SECONDS, read=None)
        try:
            async with self._client.stream(
                "POST", "/api/snapshots/verify", json={"ids": list(ids)} if ids else None, timeout=patient
            ) as answer:
                if not answer.is_success:
                    await answer.aread()
                    raise refusal(answer)
                async for line in answer.aiter_lines():
                    yield orjson.loads(line)
        except httpx.HTTPError as error:
            raise self._unreached(error) from error

    async def remove(self, snapshot: str) -> None:
        await self._asked("DELETE", f"/api/snapshots/{snapshot}")

    async def _asked(self, method: str, path: str) -> Any:
        try:
            answer = await self._client.request(method, path)
        except httpx.HTTPError as error:
            raise self._unreached(error) from error
        if not answer.is_success:
            raise refusal(answer)
        return answer.json()

    def _unreached(self, error: httpx.HTTPError) -> AskedError:
        base = str(self._client.base_url).rstrip("/")
        if isinstance(error, httpx.ConnectError):
            return AskedError(
                f"no sidecar answers at {base}. Name its admin port by --admin, or its folder by --slot-dir."
            )
        return AskedError(f"{base} broke off: {error or type(error).__name__}")


def refusal(answer: httpx.Response) -> AskedError:
    try:
        said = str(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        return AskedError(f"{answer.url} says {answer.status_code}: is that the admin port of a sidecar?")
    hint = " Give it with --admin-token." if answer.status_code == httpx.codes.UNAUTHORIZED else ""
    return AskedError(f"{said}.{hint}" if hint else said)


@asynccontextmanager
async def running(url: str | None, token: str | None) -> AsyncIterator[Running]:
    """Of what is not given, what the sidecar's own variables say (SLOTKEEPER_ADMIN_LISTEN, _TOKEN)."""
    settings = load({"admin_token": token} if token else {}).settings
    if url is None:
        address = Address.parse(settings.admin_listen)
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address.host, address.host)  # noqa: S104 - asked, not bound
        url = f"http://{Address(host, address.port)}"
    elif not url.startswith(("http://", "https://")):
        raise UsageError(f"--admin: {url!r} is not a URL; write http://HOST:PORT")
    key = settings.admin_token
    headers = {"Authorization": f"Bearer {key.get_secret_value()}"} if key else {}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=ANSWER_SECONDS) as client:
        yield Running(client)


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
