"""Reading a slot file: header, ids, the structure of the payload, the list of checkpoints."""

from __future__ import annotations

import os
import struct
from typing import BinaryIO, Final

from slotkeeper.engine.slotfile import appendix, payload
from slotkeeper.engine.slotfile.values import (
    BEFORE_IDS,
    HEADER,
    Cache,
    Damage,
    SlotFile,
    SlotFileRecord,
    Verdict,
)
from slotkeeper.engine.slotfile.view import BeyondError, StrangeError, View
from slotkeeper.scheduler.tokens import WIDTH, Tokens

MAGIC: Final = 0x67677371
VERSIONS: Final = (2, 4)  # b10434, b11549; neither reads the other's (engine.md 2.2)
WITH_APPENDIX: Final = 4
AROUND_IDS: Final = BEFORE_IDS + 1  # words, with the count of media behind the ids
MAX_TOKENS: Final = 1 << 24  # the longest contexts are of 10 million
HEAD: Final = struct.Struct("<IIIiii")


class _DamagedError(Exception):
    def __init__(self, verdict: Verdict, text: str) -> None:
        super().__init__(text)
        self.damage = Damage(verdict, text)


def read(file: BinaryIO, size: int) -> SlotFile | Damage:
    """What the file says, or why it must not be used; only an OSError of the file itself is raised.

    A few hundred small reads, whatever the size: 7 ms for 39 GB with 200,000 tokens. Only where the
    payload's structure is not understood is the rest read through for the appendix, at the disk's speed.
    Blocks, so call it in a thread.
    """
    try:
        there = file.seek(0, os.SEEK_END)
        if there != size:
            return Damage(Verdict.TORN, f"{there} bytes where there should be {size}")
        return _read(View(file, size))
    except _DamagedError as error:
        return error.damage
    except BeyondError:
        return Damage(Verdict.TORN, f"the state does not end where the file does, at {size} bytes")


def _read(view: View) -> SlotFile:
    version, tokens = _header(view)
    start = HEADER + WIDTH * (AROUND_IDS + len(tokens))
    caches = payload.walk(view, start, version)
    end, records = _end(view, version, start, caches, len(tokens))
    return SlotFile(
        version=version,
        tokens=tokens,
        payload_end=end,
        size=view.size,
        records=records,
        caches=caches or (),
        layout=payload.layout_of(caches or ()),
    )


def _header(view: View) -> tuple[int, Tokens]:
    magic, version, words, mark, kind, count = view.fields(HEAD, 0) if view.size >= HEAD.size else (0,) * 6
    if magic != MAGIC:
        raise _DamagedError(Verdict.FOREIGN, "it does not begin like a slot file")
    if version not in VERSIONS:
        raise _DamagedError(Verdict.VERSION, f"version {version}")
    # With media the list is longer and some of its ids are negative: not for us.
    if (mark, kind) != (-1, 1) or not 0 <= count <= MAX_TOKENS or words != count + AROUND_IDS:
        raise _DamagedError(Verdict.TOKENS, f"{words} words for {count} tokens")
    at = HEADER + WIDTH * BEFORE_IDS
    tokens = Tokens.of(view.take(at, WIDTH * count))
    if view.word(at + WIDTH * count) or min(tokens, default=0) < 0:
        raise _DamagedError(Verdict.TOKENS, "its tokens are not all text")
    return version, tokens


def _end(
    view: View, version: int, start: int, caches: tuple[Cache, ...] | None, n_tokens: int
) -> tuple[int, tuple[SlotFileRecord, ...]]:
    """Where the payload ends, and the checkpoints that follow."""
    if version < WITH_APPENDIX:
        return view.size, ()
    try:
        if caches is None:
            return appendix.find(view, start, n_tokens)
        end = caches[-1].end
        return end, appendix.records_at(view, end, n_tokens) if end < view.size else ()
    except StrangeError as error:
        raise _DamagedError(Verdict.APPENDIX, f"in its checkpoints: {error}") from error
