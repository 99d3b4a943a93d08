"""How the file that is kept differs from the one that the engine wrote.

A sliding window is mended so that it can be extended (T4). Checkpoints that nothing will be cut back to
are left out where they are large, and those of earlier files of the same conversation are added where
user messages begin or prompts have parted: one file can then be cut wherever the next one is likely to.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from io import FileIO
from typing import Final

from slotkeeper.core.state import user_starts
from slotkeeper.core.traits import EngineTraits, Memory
from slotkeeper.engine.slotfile import Donor, Patch, Record, SlotFile, graft, patched, repair_window
from slotkeeper.store.intake import Edit, Editor

LARGE: Final = 64 << 20  # bytes of checkpoints, from which on they are chosen
NEWEST: Final = 2  # checkpoints: the last prompt's end, and what was before it


def editor(traits: EngineTraits, cuts: Collection[int] = ()) -> Editor:
    """For the files of one engine. `cuts`: where prompts have parted from this one's tokens."""

    def edit(opened: FileIO, files: Sequence[SlotFile]) -> Edit | None:
        own, *others = files
        places = {*cuts, *user_starts(own.tokens, traits)}
        kept = worth_keeping(own, places)
        donors = missing(own, kept, others, places, traits)
        patch = mended(opened, own, traits)
        if len(kept) == len(own.records) and not donors and not patch:
            return None
        recipe = graft(own, kept, donors)
        return Edit(recipe=patched(recipe, patch) if patch else recipe, repaired=patch is not None)

    return edit


def worth_keeping(file: SlotFile, places: Collection[int]) -> list[Record]:
    """All, where they are small; else the first, the newest, and those at places where prompts part."""
    records = file.records
    if sum(record.length for record in records) < LARGE:
        return list(records)
    return [
        record
        for number, record in enumerate(records)
        if number in {0, *range(len(records) - NEWEST, len(records))} or record.at in places
    ]


def missing(
    file: SlotFile,
    kept: Sequence[Record],
    others: Sequence[SlotFile],
    places: Collection[int],
    traits: EngineTraits,
) -> list[Donor]:
    """Checkpoints of other files where prompts part from this one, as many as the engine will take."""
    left = set(places) - {record.at for record in kept}
    room = traits.checkpoint_cap - len(kept)
    donors: list[Donor] = []
    for source, other in enumerate(others, start=1):
        common = file.tokens.lcp(other.tokens)
        same = (other.version, other.layout) == (file.version, file.layout) and file.layout
        wanted = [r for r in other.records if same and r.at <= common and r.at in left][: max(0, room)]
        if wanted:
            donors.append(Donor(source=source, file=other, records=tuple(wanted)))
            left -= {record.at for record in wanted}
            room -= len(wanted)
    return donors


def mended(opened: FileIO, file: SlotFile, traits: EngineTraits) -> Patch | None:
    if traits.memory is not Memory.SWA or traits.swa_full:
        return None
    return repair_window(opened, file, traits.n_swa)
