"""How the file that is kept differs from the one that the engine wrote.

A sliding window is mended so that it can be extended (T4). Checkpoints that nothing will be cut back to
are left out where they are large, and those of earlier files of the same conversation are added where
user messages begin or prompts have parted: one file can then be cut wherever the next one is likely to.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from io import FileIO
from typing import Final

from slotkeeper.engine.slotfile import Donor, Patch, SlotFile, SlotFileRecord, graft, patched, repair_window
from slotkeeper.scheduler.state import user_starts
from slotkeeper.scheduler.traits import EngineTraits, Memory
from slotkeeper.store.intake import SlotFileEdit

LARGE: Final = 64 << 20  # bytes of checkpoints, from which on they are chosen
NEWEST: Final = 2  # checkpoints: where the next turn begins, and the last prompt's end
NEAR: Final = 16  # tokens: so close to another, a checkpoint does the same


@dataclass(slots=True)
class Editing:
    """The edit of one file. `cuts`: where prompts have parted from its tokens."""

    traits: EngineTraits
    cuts: Collection[int] = ()
    written: tuple[int, ...] | None = None  # checkpoints that the engine wrote: the slot has those

    def __call__(self, opened: FileIO, files: Sequence[SlotFile]) -> SlotFileEdit | None:
        own, *others = files
        self.written = tuple(record.at for record in own.records)
        places = {*self.cuts, *user_starts(own.tokens, self.traits)}
        kept = worth_keeping(own, places)
        donors = missing(own, kept, others, places, self.traits)
        patch = mended(opened, own, self.traits)
        if len(kept) == len(own.records) and not donors and not patch:
            return None
        recipe = graft(own, kept, donors)
        return SlotFileEdit(recipe=patched(recipe, patch) if patch else recipe, repaired=patch is not None)


def worth_keeping(file: SlotFile, places: Collection[int]) -> list[SlotFileRecord]:
    """All, where they are small; else the first, the newest, and those at places where prompts part."""
    records = file.records
    if sum(record.length for record in records) < LARGE:
        return list(records)
    wanted = {*_nearest(records, places).values(), *_newest(records), *records[:1]}
    return [record for record in records if record in wanted]


def missing(
    file: SlotFile,
    kept: Sequence[SlotFileRecord],
    others: Sequence[SlotFile],
    places: Collection[int],
    traits: EngineTraits,
) -> list[Donor]:
    """Checkpoints of other files where prompts part from this one, as many as the engine will take."""
    left = set(places) - _nearest(kept, places).keys()
    room = traits.checkpoint_cap - len(kept)
    donors: list[Donor] = []
    for source, other in enumerate(others, start=1):
        common = file.tokens.lcp(other.tokens)
        same = (other.version, other.layout) == (file.version, file.layout) and file.layout
        fitting = [r for r in other.records if same and r.at <= common and all(k.at != r.at for k in kept)]
        found = _nearest(fitting, left)
        wanted = sorted(set(found.values()), key=lambda record: record.at)[: max(0, room)]
        if wanted:
            donors.append(Donor(source=source, file=other, records=tuple(wanted)))
            left -= {place for place, record in found.items() if record in wanted}
            room -= len(wanted)
    return donors


def _nearest(records: Sequence[SlotFileRecord], places: Collection[int]) -> dict[int, SlotFileRecord]:
    """The last checkpoint before each place, for those that have one close to it."""
    ordered = sorted(records, key=lambda record: record.at)
    found = {}
    for place in places:
        index = bisect_right(ordered, place, key=lambda record: record.at)
        if index and place - ordered[index - 1].at <= NEAR:
            found[place] = ordered[index - 1]
    return found


def _newest(records: Sequence[SlotFileRecord]) -> list[SlotFileRecord]:
    """The last ones, but of several that are close together only one."""
    found: list[SlotFileRecord] = []
    for record in reversed(records):
        if len(found) < NEWEST and all(abs(record.at - other.at) > NEAR for other in found):
            found.append(record)
    return found


def mended(opened: FileIO, file: SlotFile, traits: EngineTraits) -> Patch | None:
    if traits.memory is not Memory.SWA or traits.swa_full:
        return None
    return repair_window(opened, file, traits.n_swa)
