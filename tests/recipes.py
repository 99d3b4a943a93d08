"""Slot files made from recipes in memory, and edits that only tests make."""

from __future__ import annotations

from slotkeeper.engine.slotfile import ByteSpan, Patch, Recipe, SlotFile
from slotkeeper.scheduler.tokens import WIDTH


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
    at = file.ids_at + WIDTH * (len(file.tokens) - 1)
    return Patch(at, token.to_bytes(WIDTH, "little"))
