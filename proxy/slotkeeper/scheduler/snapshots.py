"""Snapshots: slot states that lie in files, and what a slot holds once one was restored into it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from slotkeeper.scheduler.tokens import Tokens

SnapshotId = NewType("SnapshotId", str)


class Tier(StrEnum):
    HOT = "hot"  # in the engine's --slot-save-path: it can be restored at once
    COLD = "cold"  # elsewhere: it must be copied to the hot tier first


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One file that an engine wrote, that was read back and found whole.

    `checkpoints` are those in the file, in tokens and in its order; older builds write none.
    """

    id: SnapshotId
    fingerprint: str  # only an engine with the same one may load it
    tokens: Tokens
    size: int  # bytes of the file
    checkpoints: tuple[int, ...] = ()
    repaired: bool = False  # the window's cell table was mended, so that the state can be extended (T4)
    draft: bool = False  # its checkpoints carry the draft model's state
    tier: Tier = Tier.HOT
    created: float = 0.0  # seconds, the core's clock
    used: float = 0.0
    restores: int = 0  # that the engine said were worth it
    shared: bool = False  # the beginning of several prompts, or likely to be
    golden: bool = False  # it was restored as that: it goes after all others
    turns: int = 0  # of the conversation whose state it is, as far as we have seen them

    def __repr__(self) -> str:
        cuts = f" cuts {list(self.checkpoints)}" if self.checkpoints else ""
        return f"<Snapshot {self.id} {len(self.tokens)} tokens {self.size} bytes {self.tier}{cuts}>"
