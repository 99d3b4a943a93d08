"""`slotkeeper snapshots`: what is kept, whether it is whole, and away with some of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from slotkeeper.asking import AskedError
from slotkeeper.config import UsageError
from slotkeeper.inventory import Inventory
from slotkeeper.terminal.figures import UNKNOWN, age, one_line, size
from slotkeeper.terminal.out import complain, say
from slotkeeper.web.snapshots import FileVerdict

PREFIX: Final = "slotkeeper-"  # of every id: not shown
WIDE: Final = 110  # columns from which on names are long
NAME: Final = 12  # cells of one
WIDE_NAME: Final = 36
SHORTEST: Final = 4  # letters at the end of an id that may stand for it
COLOURS: Final = {FileVerdict.WHOLE: "green", FileVerdict.UNREAD: "yellow"}  # the others are red
TRAITS: Final = {"golden": "shared", "draft": "draft", "repaired": "mended"}


async def snapshots(
    action: str,
    words: Sequence[str],
    opening: AbstractAsyncContextManager[Inventory],
    console: Console,
    *,
    as_json: bool,
) -> int:
    """Do it and print it; without words to all. Returns 1 when it cannot be done, or something is damaged."""
    told: Callable[[Any], None] = say if as_json else lambda _: None
    out = Console(quiet=True) if as_json else console
    try:
        async with opening as inventory:
            document = await inventory.overview()
            cleared = document.get("notes", ())  # a folder that is opened is swept first
            for note in cleared:
                complain("snapshots", note)
            ids = chosen(words, [one["id"] for one in document["snapshots"]])
            match action:
                case "ls":
                    document["snapshots"] = [one for one in document["snapshots"] if one["id"] in ids]
                    told(document)
                    show(document, out)
                    return 0
                case "verify":
                    code = await verify(inventory, ids if words else (), out, told)
                    return code or int(bool(cleared))
                case _:
                    return await remove(inventory, ids, out, told)
    except AskedError as error:
        complain("snapshots", str(error))
        return 1


async def verify(inventory: Inventory, ids: Sequence[str], out: Console, told: Callable[[Any], None]) -> int:
    whole = total = 0
    async for line in inventory.verify(ids):
        told(line)
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


async def remove(inventory: Inventory, ids: Sequence[str], out: Console, told: Callable[[Any], None]) -> int:
    for id_ in ids:
        await inventory.remove(id_)
        told({"removed": id_})
        out.print(f"removed {short(id_)}", highlight=False)
    return 0


def chosen(words: Sequence[str], known: Sequence[str]) -> list[str]:
    """The ids that are meant, by themselves or by their ends; without words all. Raises UsageError."""
    ids = []
    for word in words:
        found = [id_ for id_ in known if id_ == word or (len(word) >= SHORTEST and id_.endswith(word))]
        if len(found) != 1:
            what = f"more than one snapshot ends in {word}" if found else f"there is no snapshot {word}"
            raise UsageError(f"{what}; `slotkeeper snapshots ls` shows them")
        ids += found
    return ids if words else list(known)


# -- for people ----------------------------------------------------------------------------------------


def show(document: dict[str, Any], out: Console) -> None:
    if document["snapshots"]:
        out.print(table(document["snapshots"], time.time(), out.width))
    for tier in document["tiers"]:
        room = f" of {size(tier['budget_bytes'])}" if tier["budget_bytes"] is not None else ""
        told = f"{tier['tier']}: {tier['snapshots']} snapshots, {size(tier['bytes'])}{room}"
        out.print(told, highlight=False)
    if document["trouble"]:
        out.print(f"[yellow]{escape(document['trouble']['what'])}[/]")


def table(listed: Sequence[dict[str, Any]], now: float, width: int) -> Table:
    """Without names where none is known, as in a folder without a sidecar."""
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
    """What is special about it; a folder without a sidecar does not know of engines."""
    found = [word for trait, word in TRAITS.items() if one[trait]]
    return [*found, "fits no engine here"] if one.get("engines") == [] else found


def short(id_: str) -> str:
    return id_.removeprefix(PREFIX)


def copy_left(line: dict[str, Any]) -> bool:
    return bool(line["tiers"]) and line["verdict"] in {FileVerdict.DAMAGED, FileVerdict.MISSING}
