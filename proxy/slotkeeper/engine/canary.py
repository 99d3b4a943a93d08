"""What an engine's slot files are like, found out by letting it write one, and why there may be none.

First the state of an idle slot is saved, which changes nothing: is the folder ours too, which version has
the file. Then, where that does not tell whether files carry checkpoints and the engine was not used yet: a
canary, a few tokens in one slot, saved and erased again. `traits` reads what an engine says of its own
accord.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from slotkeeper.engine.client import EngineClient, EngineError, Headers
from slotkeeper.engine.slotfile import Damage, SlotFile
from slotkeeper.engine.slotfile_reader import read
from slotkeeper.scheduler.engine_model import EngineTraits
from slotkeeper.scheduler.events import SlotView
from slotkeeper.scheduler.types import SlotId


class Why(StrEnum):
    """Why there are no slot files to work with."""

    OFF = "off"
    NO_FOLDER = "no_folder"
    NOT_SHARED = "not_shared"
    UNREADABLE = "unreadable"
    UNKNOWN = "unknown"
    REFUSED = "refused"
    CUT = "cut"
    BUSY = "busy"
    UNCERTAIN = "uncertain"


# What is so, and what to do.
SAID: Final[Mapping[Why, tuple[str, str]]] = {
    Why.OFF: (
        "The engine saves no slots.",
        "Add --slot-save-path, with the folder that Slotkeeper is given.",
    ),
    Why.NO_FOLDER: ("The folder is not there.", "Make it, or mount what should be there."),
    Why.NOT_SHARED: (
        "What the engine saves does not appear in the folder.",
        "Its --slot-save-path and our --slot-dir must be the same folder of the same disk.",
    ),
    Why.UNREADABLE: (
        "What the engine saves cannot be read or removed here.",
        "Run both as one user, who owns the folder.",
    ),
    Why.CUT: ("Less lies in the folder than the engine says it has written.", "Make room there."),
    Why.UNKNOWN: ("Its slot files are of a kind that Slotkeeper does not know.", "Use another build."),
    Why.REFUSED: (
        "The engine could not save a slot.",
        "Look for room in the folder, and into the engine's log.",
    ),
    Why.UNCERTAIN: (
        "The engine does not list its LoRA adapters, so what would fit it is not known.",
        "Use another build.",
    ),
    Why.BUSY: ("No slot became idle, so none could be saved.", "Try again when there is less to do."),
}


class NoFilesError(Exception):
    """No snapshots with this engine. The text says why and what to do."""

    def __init__(self, why: Why, detail: str = "") -> None:
        what, self.do = SAID[why]
        self.what = f"{what.removesuffix('.')} ({detail})." if detail else what
        super().__init__(f"{self.what} {self.do}")
        self.why = why


# -- letting it write one --------------------------------------------------------------------------------

ANY: Final = SlotId(-1)  # the engine's choice (engine.md T8)
CANARY_TOKENS: Final = 16  # 5 leave a checkpoint, whatever the batch; a large model on a CPU is slow
CANARY_TEXT: Final = " ".join(map(str, range(CANARY_TOKENS)))  # at least one token for each number
# A large batch on a slow machine; a slot that was taken meanwhile is saved at its release (engine.md 2.3).
SAVE_SECONDS: Final = 120.0
APPENDING: Final = 4  # the first version whose files may carry checkpoints (engine.md 2.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """What the files of one engine are like. Worth keeping: a canary is not possible in a used engine.

    Plain values, so that it can be stored as JSON.
    """

    engine: str  # Identity.digest of the engine that it is true for
    state_version: int
    files_carry: bool | None = None  # whether they carry checkpoints; None = not found out
    layout: str = ""  # as SlotFile has it; empty = none with tokens was seen

    def traits_into(self, traits: EngineTraits, fingerprint: str) -> EngineTraits:
        """The traits of an engine with such files."""
        return replace(
            traits,
            slot_files=True,
            state_version=self.state_version,
            files_carry=self.files_carry,
            fingerprint=fingerprint,
        )


async def probe_files(
    client: EngineClient,
    folder: Path,
    traits: EngineTraits,
    engine: str,
    *,
    may_compute: bool = False,
    known: ProbeResult | None = None,
    headers: Headers | None = None,
) -> ProbeResult:
    """Ask an engine that is awake, with no request pinned to it meanwhile.

    1. Dense memory has no checkpoints, and older versions of the file have no place for them.
    2. A slot that was in use may have some, and then they are in its file.
    3. Otherwise a canary tells, if it may and no slot was used yet.
    4. Otherwise what was found out about the same engine before.
    5. Otherwise the first file that is saved will tell.

    Args:
        client: of that engine.
        folder: its --slot-save-path, as this machine sees it.
        traits: for the memory.
        engine: its `Identity.digest`.
        may_compute: whether a canary is allowed.
        known: what was found out before, about this engine or another.
        headers: credentials, if not the client's own.

    Raises:
        NoFilesError: there will be no snapshots with this engine.
        EngineGoneError: it went away.
    """
    try:
        if not await client.saves_slots(headers=headers):
            raise NoFilesError(Why.OFF)
        if not await asyncio.to_thread(folder.is_dir):
            raise NoFilesError(Why.NO_FOLDER, str(folder))
        slot = quietest(await client.slots(headers=headers))
        file = await saved(client, folder, slot, headers)
        result = ProbeResult(engine=engine, state_version=file.version, layout=file.layout)
        if traits.cuttable or file.version < APPENDING:  # (1)
            return replace(result, files_carry=False)
        if file.records:  # (2)
            return replace(result, files_carry=True)
        if may_compute and await unused(client, headers):  # (3)
            file = await canary(client, folder, headers)
            return replace(result, files_carry=bool(file.records), layout=file.layout)
        if known and known.files_carry is not None and same(known, result):  # (4)
            return replace(result, files_carry=known.files_carry)
    except EngineError as error:
        raise NoFilesError(Why.REFUSED, str(error)) from error
    return result  # (5)


async def unused(client: EngineClient, headers: Headers | None) -> bool:
    """Whether nothing is lost if a prompt of ours takes a slot."""
    return not any(slot.busy or slot.held for slot in await client.slots(headers=headers))


def same(known: ProbeResult, now: ProbeResult) -> bool:
    return (known.engine, known.state_version) == (now.engine, now.state_version)


def quietest(views: tuple[SlotView, ...]) -> SlotId:
    """The idle slot with the smallest state. Raises NoFilesError."""
    idle = [slot for slot in views if not slot.busy]
    if not idle:
        raise NoFilesError(Why.BUSY)
    return min(idle, key=lambda slot: slot.held or 0).slot


async def canary(client: EngineClient, folder: Path, headers: Headers | None) -> SlotFile:
    """A few tokens, where the engine likes: if not pinned they never meet a running answer (engine.md T1)."""
    ids = await client.tokenize(CANARY_TEXT, add_special=False, parse_special=False, headers=headers)
    ids = ids[:CANARY_TOKENS]
    slot = (await client.prefill(ids, ANY, headers=headers)).slot
    try:
        return await saved(client, folder, slot, headers)
    finally:
        await swept(client, slot, len(ids), headers)


async def swept(client: EngineClient, slot: SlotId, held: int, headers: Headers | None) -> None:
    """Erase what we put there, unless another task has taken the slot since."""
    views = await client.slots(headers=headers)
    if any(view.slot == slot and not view.busy and view.held == held for view in views):
        await client.erase(slot, headers=headers)


async def saved(client: EngineClient, folder: Path, slot: SlotId, headers: Headers | None) -> SlotFile:
    """The state of an idle slot, by a file that is gone afterwards. Raises NoFilesError, EngineError."""
    path = folder / temporary()
    try:
        async with asyncio.timeout(SAVE_SECONDS):
            written = (await client.save(slot, path.name, headers=headers)).written
        return await asyncio.to_thread(inspected, path, written)
    except TimeoutError as error:
        raise NoFilesError(Why.BUSY) from error
    finally:
        await asyncio.to_thread(removed, path)


def temporary() -> str:
    """A name that the store takes for one of its temporary files, so that it clears away what we cannot."""
    return f"slotkeeper-{0:012x}-{secrets.token_hex(4)}.tmp"


def inspected(path: Path, written: int) -> SlotFile:
    """Read what the engine says it has written. Blocks. Raises NoFilesError."""
    try:
        size = path.stat().st_size
        if size != written:  # on a full disk the engine may still say 200, for it does not look at fclose
            raise NoFilesError(Why.CUT, f"{size} of {written} bytes")
        with path.open("rb") as file:
            found = read(file, size)
    except FileNotFoundError as error:
        raise NoFilesError(Why.NOT_SHARED, str(path.parent)) from error
    except OSError as error:
        raise NoFilesError(Why.UNREADABLE, str(error)) from error
    if isinstance(found, Damage):
        raise NoFilesError(Why.UNKNOWN, found.text)
    return found


def removed(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise NoFilesError(Why.UNREADABLE, str(error)) from error
