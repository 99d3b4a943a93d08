"""`slotkeeper snapshots`: lists, verifies and removes snapshots, of a running sidecar or in a folder."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import httpx
import orjson
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from slotkeeper.admin.admin import FileVerdict, overview, verified
from slotkeeper.cli.admin_client import ANSWER_SECONDS, AdminClient, AskedError, admin_port, refusal
from slotkeeper.cli.terminal import UNKNOWN, age, one_line, say, size
from slotkeeper.engine.client import EngineAddress
from slotkeeper.observe.standard_error import complain
from slotkeeper.scheduler.slots.engine_model import SnapshotId
from slotkeeper.store import files
from slotkeeper.store.store import Store
from slotkeeper.store.trouble import StoreError, Trouble
from slotkeeper.values import UsageError

ELSEWHERE: Final = "Give its admin port by --admin, or its folder by --slot-dir."


class Inventory(Protocol):
    """A store of snapshots, local or remote. Documents are those of the admin port. Raises AskedError."""

    async def overview(self) -> dict[str, Any]: ...

    def verify(self, ids: Sequence[str]) -> AsyncIterator[dict[str, Any]]:
        """Verify snapshots; without ids all that exist at that time. Yields one verdict for each."""
        ...

    async def remove(self, snapshot: str) -> None: ...


# -- snapshots of a running sidecar ----------------------------------------------------------------------


class SidecarSnapshots:
    """The snapshots of a running sidecar, through its admin port."""

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
async def running(
    url: str | None, token: str | None, ca: Path | None = None
) -> AsyncIterator[SidecarSnapshots]:
    async with admin_port(url, token, ELSEWHERE, ca=ca) as port:
        yield SidecarSnapshots(port)


# -- snapshots in a folder, while no sidecar runs --------------------------------------------------------


class Folder:
    """The snapshots in a folder, while no sidecar runs."""

    def __init__(self, store: Store, notes: Sequence[str]) -> None:
        """`notes` say what was deleted when the folder was opened."""
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
    """Open a folder as a sidecar does: take its lock and sweep away unfinished files.

    Raises UsageError if no sidecar has ever used the folder, AskedError if it cannot be used.
    """
    for flag, path in (("--slot-dir", hot), ("--cold-dir", cold)):
        if path and not (path / files.LOCK).is_file():
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


# -- commands --------------------------------------------------------------------------------------------

PREFIX: Final = "slotkeeper-"  # every id begins with it; it is not shown
WIDE: Final = 110  # columns of a terminal that has room for long names
NAME: Final = 12  # cells of a conversation's name
WIDE_NAME: Final = 36
SHORTEST: Final = 4  # the fewest last letters of an id that may stand for it
COLOURS: Final = {FileVerdict.WHOLE: "green", FileVerdict.UNREAD: "yellow"}  # all others are red
TRAITS: Final = {"golden": "shared", "draft": "draft", "repaired": "mended"}


async def snapshots(
    action: str,
    words: Sequence[str],
    opening: AbstractAsyncContextManager[Inventory],
    console: Console,
    *,
    as_json: bool,
) -> int:
    """Run `action` on the snapshots that `words` name, or on all without words, and print the result.

    Returns 1 if the action fails, or if a snapshot is damaged.
    """
    put: Callable[[Any], None] = say if as_json else lambda _: None
    out = Console(quiet=True) if as_json else console
    try:
        async with opening as inventory:
            document = await inventory.overview()
            cleared = document.get("notes", ())  # opening a folder sweeps it first
            for note in cleared:
                complain("snapshots", note)
            ids = chosen(words, [one["id"] for one in document["snapshots"]])
            match action:
                case "ls":
                    document["snapshots"] = [one for one in document["snapshots"] if one["id"] in ids]
                    put(document)
                    show(document, out)
                    return 0
                case "verify":
                    code = await verify(inventory, ids if words else (), out, put)
                    return code or int(bool(cleared))
                case _:
                    return await remove(inventory, ids, out, put)
    except AskedError as error:
        complain("snapshots", str(error))
        return 1


async def verify(inventory: Inventory, ids: Sequence[str], out: Console, put: Callable[[Any], None]) -> int:
    whole = total = 0
    async for line in inventory.verify(ids):
        put(line)
        total += 1
        whole += line["verdict"] == FileVerdict.WHOLE
        colour, word = COLOURS.get(line["verdict"], "red"), line["verdict"]
        left = f"; a whole copy is left: {', '.join(line['tiers'])}" if copy_left(line) else ""
        out.print(
            f"[{colour}]{word:8}[/] {short(line['id'])}  {escape(line['why'])}{left}",
            highlight=False,
            soft_wrap=True,
        )
    out.print(f"{whole} of {total} are whole.", highlight=False)
    return int(whole < total)


async def remove(inventory: Inventory, ids: Sequence[str], out: Console, put: Callable[[Any], None]) -> int:
    for id_ in ids:
        await inventory.remove(id_)
        put({"removed": id_})
        out.print(f"removed {short(id_)}", highlight=False)
    return 0


def chosen(words: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the ids that the words name, in full or by their last letters; without words all.

    Raises UsageError if a word names no snapshot, or more than one.
    """
    ids = []
    for word in words:
        found = [id_ for id_ in known if id_ == word or (len(word) >= SHORTEST and id_.endswith(word))]
        if len(found) != 1:
            what = f"more than one snapshot ends in {word}" if found else f"there is no snapshot {word}"
            raise UsageError(f"{what}; `slotkeeper snapshots ls` shows them")
        ids += found
    return ids if words else list(known)


# -- output for people -----------------------------------------------------------------------------------


def show(document: dict[str, Any], out: Console) -> None:
    if document["snapshots"]:
        out.print(table(document["snapshots"], time.time(), out.width))
    for tier in document["tiers"]:
        room = f" of {size(tier['budget_bytes'])}" if tier["budget_bytes"] is not None else ""
        summary = f"{tier['tier']}: {tier['snapshots']} snapshots, {size(tier['bytes'])}{room}"
        out.print(summary, highlight=False)
    if document["trouble"]:
        out.print(f"[yellow]{escape(document['trouble']['what'])}[/]")


def table(listed: Sequence[dict[str, Any]], now: float, width: int) -> Table:
    """Return the table of snapshots; without a column of names if none is known, as in a folder."""
    named = any(one.get("name") for one in listed)
    found = Table(box=None, padding=(0, 1), collapse_padding=True, pad_edge=False)  # 80 columns are enough
    found.add_column("id", no_wrap=True)
    for name in ("tokens", "size", "cuts"):
        found.add_column(name, justify="right", no_wrap=True)
    found.add_column("where", no_wrap=True)
    if named:
        found.add_column("conversation", no_wrap=True, max_width=WIDE_NAME if width >= WIDE else NAME)
    for name in ("made", "used", "hits"):
        found.add_column(name, justify="right", no_wrap=True)
    found.add_column("notes")
    for one in listed:
        found.add_row(
            short(one["id"]),
            f"{one['tokens']:,}",
            size(one["bytes"]),
            str(len(one["checkpoints"])),
            ", ".join(one["tiers"]),
            *([Text(one_line(one.get("name") or UNKNOWN))] if named else []),
            age(one["created"], now),
            age(one["used"], now),
            str(one["restores"]),
            ", ".join(notes(one)),
        )
    return found


def notes(one: dict[str, Any]) -> list[str]:
    """Return the notes on a snapshot: its traits and models, and whether no engine of the sidecar fits."""
    found = [word for trait, word in TRAITS.items() if one[trait]]
    models = {EngineAddress.of(engine).model for engine in one.get("engines") or ()}
    found += sorted(filter(None, models))
    return [*found, "fits no engine here"] if one.get("engines") == [] else found


def short(id_: str) -> str:
    return id_.removeprefix(PREFIX)


def copy_left(line: dict[str, Any]) -> bool:
    """Whether another tier still has a whole copy of a damaged or missing snapshot."""
    return bool(line["tiers"]) and line["verdict"] in {FileVerdict.DAMAGED, FileVerdict.MISSING}
