"""Slot files made from recipes in memory, edits that only tests make, and a look at all files of a store."""

from __future__ import annotations

from typing import Final

from slotkeeper.engine.slotfile import BEFORE_IDS, HEADER, ByteSpan, Patch, Recipe, SlotFile
from slotkeeper.scheduler.prompts.tokens import WIDTH
from slotkeeper.scheduler.slots.engine_model import SnapshotId
from slotkeeper.store.store import Store
from slotkeeper.store.trouble import SnapshotError

IDS_AT: Final = HEADER + WIDTH * BEFORE_IDS  # the offset of the first token's id


def whole(file: SlotFile) -> Recipe:
    return (ByteSpan(0, file.size),)


def made(recipe: Recipe, source: bytes) -> bytes:
    """Return what `store.files.pour` writes, without a disk."""
    spans = (
        piece if isinstance(piece, bytes) else source[piece.offset : piece.offset + piece.length]
        for piece in recipe
    )
    return b"".join(spans)


def other_last_token(file: SlotFile, token: int) -> Patch:
    """Change the last token. The engine then goes back to the checkpoint before it (engine.md 2.6).

    The draft model's state goes back, too.
    """
    at = IDS_AT + WIDTH * (len(file.tokens) - 1)
    return Patch(at, token.to_bytes(WIDTH, "little"))


async def damaged(store: Store) -> dict[SnapshotId, SnapshotError]:
    """Verify every snapshot. Returns those with a damaged or missing copy, and the reason."""
    bad = {}
    for kept in store.listing():
        try:
            await store.verify(kept.id)
        except SnapshotError as error:
            bad[kept.id] = error
    return bad
