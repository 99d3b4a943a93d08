"""What a slot file says, as values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from slotkeeper.scheduler.tokens import WIDTH, Tokens

HEADER: Final = 12  # bytes: magic, version, count of the words that follow
BEFORE_IDS: Final = 3  # words: -1, 1, the number of tokens


class Verdict(StrEnum):
    """Why a file must not be given to an engine."""

    FOREIGN = "foreign"  # not a slot file at all
    VERSION = "version"  # a slot file of a version that we do not know
    TOKENS = "tokens"  # its list of tokens contradicts itself, or holds more than text
    TORN = "torn"  # its state does not end where the file ends (engine.md T2)
    APPENDIX = "appendix"  # its checkpoints contradict themselves; a wrong one aborts the engine (T2)


@dataclass(frozen=True, slots=True)
class Damage:
    """What is wrong, in one line."""

    verdict: Verdict
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """One of the engine's memories as it lies in the payload; lengths and offsets in bytes."""

    recurrent: bool  # a recurrent state, else keys and values
    table: int  # where its cell table begins
    cells: int
    stride: int  # of a cell in the table
    end: int
    shape: str  # types, row sizes and flags, but no counts of tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFileRecord:
    """One checkpoint in the appendix: the state after the first `at` tokens."""

    at: int
    pos_min: int
    pos_max: int
    offset: int
    length: int  # bytes with its 40 bytes of fields
    draft: bool  # it carries the draft model's state too


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFile:
    """A slot file that was walked to its end.

    `layout` is a digest of everything but the tokens: two files of one engine have the same one, and a
    file of an engine with other flags or another architecture has another. It is empty where the payload's
    structure was not understood, or where it has no tokens. Compare it: a file that was cut exactly
    between two memories is whole in itself, and only its layout tells.
    """

    version: int
    tokens: Tokens
    payload_end: int  # offset of the appendix, or the end of the file
    size: int
    records: tuple[SlotFileRecord, ...]  # in the file's order, which is the engine's own
    caches: tuple[Cache, ...]  # in the file's order; none where the structure was not understood
    layout: str

    def __repr__(self) -> str:
        cuts = f" checkpoints {[record.at for record in self.records]}" if self.records else ""
        return f"<SlotFile v{self.version} {len(self.tokens)} tokens {self.size} bytes{cuts}>"

    @property
    def ids_at(self) -> int:
        """Offset of the first token's id."""
        return HEADER + WIDTH * BEFORE_IDS
