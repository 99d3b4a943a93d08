"""Experiments on an engine: the format of its slot files, and whether text follows each image of a prompt.

`canary` tries out the flags; `traits` reads what the engine's answers show.
"""

from __future__ import annotations

import asyncio
import secrets
import struct
import zlib
from base64 import b64encode
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from slotkeeper.engine.answers import EngineError, MediaPrompt, NoFilesError, Why
from slotkeeper.engine.client import EngineClient, Headers
from slotkeeper.engine.slotfile import Damage, SlotFile, read
from slotkeeper.scheduler.slots.engine_model import EngineTraits, keeps_checkpoints
from slotkeeper.scheduler.types import SlotId, SlotView

# -- slot files, by letting it write one -----------------------------------------------------------------
# We save the state of an idle slot, which changes nothing. This shows whether we see the engine's folder, and
# the version of its files, which says whether they have checkpoints.

ANY: Final = SlotId(-1)  # the engine's choice (engine.md T8)
# Enough for a large batch on a slow machine. If a task takes the slot first, the engine saves it when that
# task ends (engine.md 2.3).
SAVE_SECONDS: Final = 120.0
APPENDING: Final = 4  # the first version whose files carry checkpoints (engine.md 2.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The format of one engine's slot files. Callers store it, because a used engine allows no canary.

    All values are plain, so that the result can be stored as JSON.
    """

    engine: str  # Identity.digest of the engine that wrote the files
    state_version: int
    files_carry: bool | None = None  # whether the files carry checkpoints; None = unknown
    layout: str = ""  # SlotFile.layout; empty = no file with tokens was seen
    projector: str = ""  # the projector for which `images_closed` is known; empty = none
    images_closed: bool | None = None  # whether text follows each image; None = unknown

    def traits_into(self, traits: EngineTraits, fingerprint: str) -> EngineTraits:
        """Return the traits with the facts about slot files filled in."""
        return replace(
            traits,
            slot_files=True,
            state_version=self.state_version,
            files_carry=self.files_carry,
            fingerprint=fingerprint,
        )


async def probe_files(
    client: EngineClient, folder: Path, traits: EngineTraits, engine: str, *, headers: Headers | None = None
) -> ProbeResult:
    """Find out the format of an engine's slot files. It must be awake, and no pinned request may run there.

    1. An engine that makes no checkpoints writes none, and older versions of the file have no place for them.
    2. All builds of the newer version append them. The first long snapshot of an engine that does not
       corrects this (`EngineTable.learn_files`).

    Args:
        client: the client of that engine.
        folder: the engine's --slot-save-path, as this machine sees it.
        traits: the engine's traits; only its memory and its checkpoints are used.
        engine: the engine's `Identity.digest`.
        headers: credentials, if not the client's own.

    Raises:
        NoFilesError: snapshots are not possible with this engine.
        EngineGoneError: the engine does not answer any more.
    """
    try:
        if not await client.saves_slots(headers=headers):
            raise NoFilesError(Why.OFF)
        if not await asyncio.to_thread(folder.is_dir):
            raise NoFilesError(Why.NO_FOLDER, str(folder))
        slot = quietest(await client.slots(headers=headers))
        file = await saved(client, folder, slot, headers)
    except EngineError as error:
        raise NoFilesError(Why.REFUSED, str(error)) from error
    carry = keeps_checkpoints(traits) and file.version >= APPENDING  # (1) (2)
    return ProbeResult(engine=engine, state_version=file.version, files_carry=carry, layout=file.layout)


async def unused(client: EngineClient, headers: Headers | None) -> bool:
    """Whether every slot is idle and empty, so that a prompt of ours overwrites nothing."""
    return not any(slot.busy or slot.held for slot in await client.slots(headers=headers))


def quietest(views: tuple[SlotView, ...]) -> SlotId:
    """Return the idle slot with the smallest state. Raises NoFilesError if all slots are busy."""
    idle = [slot for slot in views if not slot.busy]
    if not idle:
        raise NoFilesError(Why.BUSY)
    return min(idle, key=lambda slot: slot.held or 0).slot


async def swept(client: EngineClient, slot: SlotId, held: int, headers: Headers | None) -> None:
    """Erase a slot after our canary, unless another task has taken the slot since.

    `held` is the number of tokens that the canary left there.
    """
    views = await client.slots(headers=headers)
    if any(view.slot == slot and not view.busy and view.held == held for view in views):
        await client.erase(slot, headers=headers)


async def saved(client: EngineClient, folder: Path, slot: SlotId, headers: Headers | None) -> SlotFile:
    """Save an idle slot, read its file and delete the file. Raises NoFilesError, EngineError."""
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
    """Return a name that the store takes for a temporary file, so that it deletes any file that we leave."""
    return f"slotkeeper-{0:012x}-{secrets.token_hex(4)}.tmp"


def inspected(path: Path, written: int) -> SlotFile:
    """Read a slot file for which the engine reported `written` bytes. Blocks. Raises NoFilesError."""
    try:
        size = path.stat().st_size
        if size != written:  # on a full disk the engine may still answer 200: it does not check fclose
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


# -- whether text follows each image ---------------------------------------------------------------------
# Where files carry no checkpoints, only a file that ends right behind an image serves several questions about
# it. A prompt that ends in an image aborts an engine whose projector puts no text there (engine.md 15). So a
# short prompt with a small image and text behind it is saved once: its file shows where the image ends.

BEFORE, BEHIND = "0 1", "2 3"  # texts around the image
SIDE: Final = 64  # pixels


async def probe_images(
    client: EngineClient,
    folder: Path,
    traits: EngineTraits,
    found: ProbeResult,
    marker: str,
    *,
    may_compute: bool = False,
    known: ProbeResult | None = None,
    headers: Headers | None = None,
) -> ProbeResult:
    """Find out whether the engine puts text behind each image; only where that decides which files are made.

    Without a canary it stays unknown, unless an earlier probe tried the same projector.

    Args:
        client: the client of that engine.
        folder: the engine's --slot-save-path, as this machine sees it.
        traits: the engine's traits.
        found: the format of its files.
        marker: what stands for an image in a prompt; "" = the engine accepts no images.
        may_compute: whether a canary is allowed.
        known: the result of an earlier probe, of this engine or of another.
        headers: credentials, if not the client's own.

    Raises:
        EngineGoneError: the engine does not answer any more.
    """
    if not marker or traits.cuttable or found.files_carry is not False:
        return found
    if known and known.projector == traits.projector and known.images_closed is not None:
        return replace(found, projector=known.projector, images_closed=known.images_closed)
    try:
        if may_compute and await unused(client, headers):
            closed = await _closes(client, folder, marker, headers)
            return replace(found, projector=traits.projector, images_closed=closed)
    except (EngineError, NoFilesError):  # the engine refuses such an image, or its file cannot be read
        pass
    return found


async def _closes(client: EngineClient, folder: Path, marker: str, headers: Headers | None) -> bool:
    behind = await client.tokenize(BEHIND, add_special=False, parse_special=False, headers=headers)
    white = png(SIDE, SIDE, b"\xff" * 3 * SIDE * SIDE)
    prompt = MediaPrompt(text=BEFORE + marker + BEHIND, data=(b64encode(white).decode(),), length=0)
    prefilled = await client.prefill(prompt, ANY, headers=headers)
    try:
        file = await saved(client, folder, prefilled.slot, headers)
    finally:
        await swept(client, prefilled.slot, prefilled.held, headers)
    image_end = file.images[-1].start + file.images[-1].length if file.images else len(file.tokens)
    return len(file.tokens) - image_end > len(behind)


def png(width: int, height: int, pixels: bytes) -> bytes:
    """Return a picture as a PNG file. `pixels`: row by row, three bytes each, for red, green and blue."""

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = b"".join(b"\0" + pixels[at : at + 3 * width] for at in range(0, len(pixels), 3 * width))
    parts = part(b"IHDR", head) + part(b"IDAT", zlib.compress(rows)) + part(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts
