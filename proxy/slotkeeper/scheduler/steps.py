"""What can be done to a slot before a request goes there, or in idle time: one step at a time.

A step is part of a plan; bound to its owner and its slot it is an effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from slotkeeper.scheduler.catalog import Catalog
from slotkeeper.scheduler.checkpoints import TAIL
from slotkeeper.scheduler.effects import Erase, Plant, Purpose, Restore, Save, SaveMoment
from slotkeeper.scheduler.snapshots import Snapshot
from slotkeeper.scheduler.table import EngineTable
from slotkeeper.scheduler.tokens import EMPTY, Tokens
from slotkeeper.scheduler.tree import PromptTree
from slotkeeper.scheduler.types import Place, RequestId, SlotId


@dataclass(frozen=True, slots=True)
class Prefill:
    """Make the slot hold exactly these tokens."""

    tokens: Tokens
    purpose: Purpose

    @property
    def parks(self) -> bool:
        """Whether it only gives up a few tokens, so that the state behind them can be saved."""
        return self.purpose is Purpose.BACK


@dataclass(frozen=True, slots=True)
class Keep:
    """Save what the slot holds."""

    moment: SaveMoment


@dataclass(frozen=True, slots=True)
class Load:
    """Restore a file into the slot."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Wipe:
    """Empty the slot: the engine would cut it where it must not (T9)."""


Step = Prefill | Keep | Load | Wipe


def marked(tokens: Tokens) -> Tokens:
    """The same with foreign tokens behind, so that the engine keeps a checkpoint at their end.

    A prompt that continues there diverges from the foreign ones and rolls back to it and its drafts.
    """
    return tokens + Tokens([tokens[0]] * TAIL)


def unmarked(tokens: Tokens) -> Tokens:
    """Without the foreign tokens, where there are some."""
    bare = tokens.cut(0, max(0, len(tokens) - TAIL))
    return bare if bare and tokens == marked(bare) else tokens


def is_marked(tokens: Tokens) -> bool:
    return unmarked(tokens) is not tokens


def effect(
    step: Step, owner: RequestId, table: EngineTable, slot: SlotId, *, catalog: Catalog, tree: PromptTree
) -> Plant | Save | Restore | Erase:
    place = Place(table.engine, slot)
    match step:
        case Prefill(tokens, purpose):
            return Plant(request=owner, place=place, tokens=tokens, purpose=purpose)
        case Keep(moment):
            contents = table.shadow.slots[slot]
            tokens = contents.tokens if contents else EMPTY
            return Save(
                request=owner,
                place=place,
                moment=moment,
                tokens=tokens,
                size=table.rates.size_of(contents.total if contents else 0),
                others=catalog.kin(tokens, table.traits),
                cuts=tuple(branch.at for branch in tree.branches(tokens)),
            )
        case Load(snapshot):
            return Restore(request=owner, place=place, snapshot=snapshot)
        case Wipe():
            return Erase(request=owner, place=place)
        case _:
            assert_never(step)
