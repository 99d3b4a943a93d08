"""What is to be saved of a slot, and what must be done for it: one step at a time, seen anew after each.

Newer builds write checkpoints into slot files: one file at the end can be cut wherever the slot could.
Older builds do not (engine.md 2.6): there the end, the last prompt's end and every user message get a
file each. The slot is cut back from one to the next, which costs a few tokens, and is then brought home.

With a draft model a file's own end restores without draft state; a checkpoint restores with it. So four
foreign tokens are put behind the end first: that makes a checkpoint there, and the next prompt parts
from them and goes back to it (engine.md 2.6).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from slotkeeper.core.chore import Chore
from slotkeeper.core.effects import Moment, Purpose
from slotkeeper.core.held import Held
from slotkeeper.core.shelf import Shelf
from slotkeeper.core.snapshots import Tier
from slotkeeper.core.state import user_starts
from slotkeeper.core.steps import Keep, Load, Prefill, Step
from slotkeeper.core.table import EngineTable
from slotkeeper.core.tokens import Tokens
from slotkeeper.core.traits import EngineTraits

LEAST: Final = 256  # tokens: a shorter conversation is computed sooner than restored
NEW: Final = 32  # tokens that are in no file yet, below which it is not saved again
BOUNDARIES: Final = 8  # at most, of one slot
FOREIGN: Final = 4  # tokens behind the end: the engine's last cut is so far before a prompt's end


def worth_saving(held: Held, table: EngineTable, shelf: Shelf) -> bool:
    """Whether enough of it is in no file."""
    if held.total < LEAST or held.rough:
        return False
    if held.total - shelf.covers(held, table.traits) >= NEW:
        return True
    return next(_unsaved_cuts(held, table.traits, shelf), None) is not None


def first_step(held: Held, table: EngineTable) -> Step:
    return _mark(held, table.traits) or Keep(Moment.PAUSE)


def next_step(chore: Chore, shelf: Shelf) -> Step | None:
    """After a step that went well; None when all is saved and the slot is home again."""
    held, home, traits = chore.held, chore.home, chore.table.traits
    if held is None:
        return None
    if held.total == home.total and home.opaque:  # the file has told the ids that we did not know
        home = chore.home = held
    if isinstance(chore.step, Prefill) and chore.step.purpose in {Purpose.CUT, Purpose.DRAFT}:
        return Keep(Moment.PAUSE)
    if isinstance(chore.step, Keep) and held is home and (mark := _mark(held, traits)):
        return mark
    if not isinstance(chore.step, Load) and not _came_home(chore):
        for cut in _unsaved_cuts(home, traits, shelf):
            if cut < held.total:
                return Prefill(home.tokens.cut(0, cut), Purpose.CUT)
    return None if held.total >= home.total else _way_home(home, chore.table, shelf)


def _mark(held: Held, traits: EngineTraits) -> Step | None:
    """Foreign tokens behind the end, so that a file made then carries the draft state there."""
    if not (traits.speculative and traits.files_carry) or held.opaque:
        return None
    if any(c.at == held.total for c in held.checkpoints) or len(held.tokens) < LEAST:
        return None
    if len(held.tokens) > FOREIGN and any(c.at == held.total - FOREIGN for c in held.checkpoints):
        return None  # they are there already
    first = held.tokens.cut(0, 1)
    return Prefill(held.tokens + first + first + first + first, Purpose.DRAFT)


def _unsaved_cuts(held: Held, traits: EngineTraits, shelf: Shelf) -> Iterator[int]:
    """Where the slot can be cut and no file is, longest first: tokens, one more than its checkpoint."""
    if traits.cuttable or traits.files_carry is not False:
        return
    starts = set(user_starts(held.tokens, traits))
    last = max((c.at for c in held.checkpoints), default=0)
    places = sorted((c.at for c in held.checkpoints if c.at == last or c.at in starts), reverse=True)
    for at in places[:BOUNDARIES]:
        inside = LEAST <= at < len(held.tokens)
        if inside and at - shelf.covered(held.tokens.cut(0, at + 1), traits) >= NEW:
            yield at + 1


def _came_home(chore: Chore) -> bool:
    return isinstance(chore.step, Prefill) and chore.step.purpose is Purpose.HOME


def _way_home(home: Held, table: EngineTable, shelf: Shelf) -> Step | None:
    """From its own file; with a draft model by computing it, since a file would leave the drafts bad."""
    if home.opaque:
        return None
    if table.traits.speculative:
        return Prefill(home.tokens, Purpose.HOME)
    best = shelf.best(home.tokens + Tokens([-1]), table.traits, lambda s: float(s.tier is Tier.COLD))
    return Load(best[0]) if best and best[1] == home.total else None
