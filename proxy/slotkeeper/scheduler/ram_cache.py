"""The engine's RAM prompt cache: what goes in, what is kept, what is loaded (engine.md 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from slotkeeper.scheduler.slot_contents import SlotContents, bare
from slotkeeper.scheduler.tokens import Tokens
from slotkeeper.scheduler.traits import EngineTraits

RAM_ENTRIES: Final = 64  # the engine's limit is in bytes, which we cannot see; a wrong guess is corrected
KEEP: Final = 0.5  # below this share of a slot kept, the engine saves the slot and looks for better
LOAD: Final = 0.25  # an entry must keep at least this share of itself to be loaded


def parks(contents: SlotContents | None, traits: EngineTraits, common: int = 0, length: int = 1) -> bool:
    """Whether a pinned task of `length` tokens makes the engine save this slot; an empty one never (T6).

    A slot that is not similar enough to be chosen counts as one of which nothing would be kept.
    """
    if not traits.ram_cache or traits.similarity == 0 or not contents or contents.total == 0:
        return False
    return common / contents.total < KEEP or common / max(1, length) <= traits.similarity


def better(contents: SlotContents | None, ram: Sequence[SlotContents], prompt: Tokens) -> SlotContents | None:
    """The entry that the engine would load: it must beat the slot on both shares."""
    common = contents.tokens.lcp(prompt) if contents else 0
    keep = common / contents.total if contents and contents.total else -1.0
    similar = common / max(1, len(prompt))
    best = None
    for entry in ram:
        shared = entry.tokens.lcp(prompt)
        entry_keep, entry_similar = shared / max(1, entry.total), shared / max(1, len(prompt))
        if entry_keep >= LOAD and entry_keep > keep and entry_similar > similar:
            keep, similar, best = entry_keep, entry_similar, entry
    return best


def contains(outer: SlotContents, inner: SlotContents) -> bool:
    """Whether all of `inner` is in `outer`.

    A reply of unknown tokens is not taken for what came after it in another state: it was not sent back as
    it was sampled, or drafts lie behind its end.
    """
    if outer.total == inner.total:  # the same, but perhaps not known as far
        return outer.tokens.begins_with(inner.tokens) or inner.tokens.begins_with(outer.tokens)
    return outer.total > inner.total and not inner.opaque and outer.tokens.begins_with(inner.tokens)


def publish(ram: list[SlotContents], contents: SlotContents, traits: EngineTraits) -> None:
    """Copy a state into the RAM cache: skipped if contained, replacing those it contains."""
    if contents.total == 0:
        return
    ours, contained = contents.tokens.packed, []
    for place, entry in enumerate(ram):
        theirs = entry.tokens.packed
        if not (theirs.startswith(ours) or ours.startswith(theirs)):  # of nearly all: seen without a call
            continue
        if contains(entry, contents):  # the engine keeps what it has; we may have learnt more of its ids
            ram[place] = (
                entry.known_as(contents.tokens) if len(contents.tokens) > len(entry.tokens) else entry
            )
            return
        if contains(contents, entry):
            contained.append(place)
    for place in reversed(contained):
        del ram[place]
    del ram[: max(0, len(ram) - RAM_ENTRIES + 1)]
    ram.append(bare(contents, traits))
