"""What a slot, a snapshot or the engine's RAM prompt cache holds, and how much of it a new prompt can use.

`reuse` mirrors the engine's own decision (engine.md section 5): it is the prediction of `cache_n`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, NewType

from slotkeeper.scheduler.engine_model import (
    Checkpoint,
    EngineTraits,
    Memory,
    checkpoints_last,
    engine_goes_back_to,
    keeps_checkpoints,
    newest_usable,
    window_cells,
)
from slotkeeper.scheduler.types import EMPTY, RequestId, Tokens

SnapshotId = NewType("SnapshotId", str)


class Tier(StrEnum):
    """Where a snapshot lies."""

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
    created: float = 0.0  # seconds, the scheduler's clock
    used: float = 0.0
    restores: int = 0  # that the engine said were worth it
    shared: bool = False  # the beginning of several prompts, or likely to be
    golden: bool = False  # it was restored as that: it goes after all others
    turns: int = 0  # of the conversation whose state it is, as far as we have seen them

    def __repr__(self) -> str:
        cuts = f" cuts {list(self.checkpoints)}" if self.checkpoints else ""
        return f"<Snapshot {self.id} {len(self.tokens)} tokens {self.size} bytes {self.tier}{cuts}>"


# -- what one sequence state holds -----------------------------------------------------------------------

RESTORED: Final = 0  # a restored checkpoint is of no task of ours
HALF_LIFE: Final = 900.0  # seconds after which an unused conversation is half as likely to return


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotContents:
    """A slot's content, or that of an entry in the engine's RAM prompt cache."""

    tokens: Tokens = EMPTY  # the ids we know, from the first on
    opaque: int = 0  # tokens after them: the engine says they are there, we do not know their ids
    checkpoints: tuple[Checkpoint, ...] = ()
    possible: tuple[
        Checkpoint, ...
    ] = ()  # where there would be some if the engine threw none away; see `evidence`
    slack: int = 0  # SWA: tokens it can be cut back without a checkpoint
    floor: int = 0  # --swa-full: below it the window is not there, though the engine thinks so (T9)
    hash_chain: tuple[bytes, ...] = ()  # the messages, as chained digests
    following: Tokens | None = None  # what the next turn's prompt will begin with
    sure: bool = False  # it is just that: the next turn extends it
    foreseen: bool = False  # nothing more will be learned of how the next turn begins
    given_up: int = 0  # tokens of its own that were given up for that
    request: RequestId | None = None  # who wrote it last
    turns: int = 0  # how often it was continued
    used: float = 0.0  # seconds, the driver's clock
    adapted: bool = False  # written with LoRA scales of a request's own: of no use to any other
    from_file: bool = False  # it began as a file without checkpoints: it can be cut only behind that
    rough: bool = False  # how far its end got is not known: the engine's next count decides

    @property
    def total(self) -> int:
        return len(self.tokens) + self.opaque

    def chance(self, now: float) -> float:
        """How likely this content is to be asked for again: more turns, more recent, more likely."""
        faded: float = 2.0 ** (-max(0.0, now - self.used) / HALF_LIFE)
        return self.turns / (self.turns + 1) * faded

    def known_as(self, tokens: Tokens) -> SlotContents:
        """The same state, now that more of its ids are known. Its length does not change."""
        known = tokens.cut(0, self.total).within(self.tokens.space)
        return replace(self, tokens=known, opaque=self.total - len(known))

    def followed_by(self, tokens: Tokens | None) -> SlotContents:
        """The same state, with the beginning of the next turn, or with the fact that it is unknown."""
        if tokens is None:
            return replace(self, foreseen=True)
        tokens = tokens.within(self.tokens.space)
        there = tokens == self.tokens and not self.opaque
        return replace(self, following=None if there else tokens, sure=there, foreseen=True)

    def seen_as(self, tokens: Tokens, checkpoints: Sequence[int] | None) -> SlotContents:
        """The same state, as a file of it shows it. `checkpoints`: None where files do not carry them."""
        known = {c.at: c for c in self.checkpoints}
        kept = (
            self.checkpoints
            if not checkpoints
            else tuple(known.get(at, Checkpoint(at, RESTORED)) for at in checkpoints)
        )
        known_as = tokens.within(self.tokens.space)
        return replace(self, tokens=known_as, opaque=0, checkpoints=kept, rough=False)

    def relisted(self, traits: EngineTraits) -> SlotContents:
        """The same state, now that it is known how many checkpoints the engine keeps, and for how long."""
        made = self.possible if self.possible and checkpoints_last(traits) else self.checkpoints
        kept = made[-traits.checkpoint_cap :] if keeps_checkpoints(traits) else ()
        return replace(self, checkpoints=kept)

    def shrunk(self, total: int) -> SlotContents:
        """The same state, when the engine says it holds `total` tokens."""
        known = self.tokens.cut(0, total)
        left = tuple(c for c in self.checkpoints if c.at <= total)
        return replace(self, tokens=known, opaque=total - len(known), checkpoints=left, rough=False)


def restored(
    snapshot: Snapshot, traits: EngineTraits, *, request: RequestId | None = None, now: float
) -> SlotContents:
    """What a slot holds once this file was restored into it (engine.md 2.6).

    The engine takes the last checkpoints of the file, as many as its list may have.
    """
    carried = snapshot.checkpoints if keeps_checkpoints(traits) and traits.files_carry is not False else ()
    possible = tuple(Checkpoint(at, RESTORED, max(0, at - window_cells(traits))) for at in carried)
    state = SlotContents(
        tokens=snapshot.tokens,
        checkpoints=possible[-traits.checkpoint_cap :],
        possible=possible if traits.guessed else (),
        request=request,
        turns=snapshot.turns,
        from_file=keeps_checkpoints(traits) and not carried,
        used=now,
    )
    # A mended window is one position longer than a bare one, so that it can be extended.
    return replace(bare(state, traits), slack=1 if snapshot.repaired else 0)


def bare(state: SlotContents, traits: EngineTraits) -> SlotContents:
    """The same state, copied to a file or to the RAM cache and back: a window loses what lies before it."""
    cut_short = traits.memory is Memory.SWA and traits.swa_full and state.total > traits.n_swa
    return replace(state, slack=0, floor=state.total - 1 if cut_short else 0)


def reuse(contents: SlotContents | None, prompt: Tokens, traits: EngineTraits) -> int:
    """Tokens of `prompt` that the engine will not compute again, if this state is extended."""
    if contents is None or contents.total == 0 or len(prompt) < 2:
        return 0
    common = min(contents.tokens.lcp(prompt), len(prompt) - 1)  # it evaluates at least one token
    if traits.cuttable:
        return common if common >= contents.floor else 0
    if _extends(contents, prompt, common, traits):
        return common
    return newest_usable(contents.checkpoints, common, traits)


def unsafe(contents: SlotContents | None, prompt: Tokens, traits: EngineTraits) -> bool:
    """Whether the engine would give wrong answers from this state, so that it must be erased first.

    It would cut it where its window is gone (T9), or go back to a checkpoint of other tokens (T11). Where
    nothing can be erased, the second is left to the engine, as without us.
    """
    if contents is None or not (contents.floor or any(c.stale for c in contents.checkpoints)):
        return False  # nearly always: then prompts need not be compared
    common = min(contents.tokens.lcp(prompt), len(prompt) - 1)
    if contents.floor:
        return contents.floor + 1 - traits.n_swa < common < contents.floor
    if traits.cuttable or not traits.slot_files or _extends(contents, prompt, common, traits):
        return False
    found = engine_goes_back_to(contents.checkpoints, common, traits)
    return found is not None and found.stale


def goes_on_from(contents: SlotContents, traits: EngineTraits) -> int:
    """Tokens of this state at which a file of it should end, so that its next turn can go on from there.

    All of them, where a file can be cut as the slot can, or where the next turn is known to extend it. Else
    one more than the newest checkpoint before the place where that parts: the end of the last prompt, as
    long as the form in which its reply comes back is unknown.
    """
    if not traits.files_only_extend or contents.sure:
        return contents.total
    common = contents.total
    if contents.following is not None:
        common = contents.tokens.lcp(contents.following)
        if common == contents.total:
            return contents.total
    at = max((c.at for c in contents.checkpoints if c.at <= common), default=0)
    return at + 1 if 0 < at < min(len(contents.tokens), contents.total - 1) else contents.total


def first_kept(contents: SlotContents | None, kept: int, traits: EngineTraits) -> int:
    """The first position that a sliding window holds once this state was cut back to `kept` tokens."""
    if contents is None or kept == 0 or traits.cuttable or traits.memory is not Memory.SWA:
        return 0
    if kept > contents.total - contents.slack:
        return max(0, contents.total - contents.slack - traits.n_swa)
    return max(0, kept + 1 - traits.n_swa)  # from a checkpoint, which has the bare window


def slack(total: int, first: int, traits: EngineTraits) -> int:
    """How far a sliding window that begins at `first` can be cut back from `total` tokens."""
    if traits.memory is not Memory.SWA:
        return 0
    return max(0, total - traits.n_swa - max(first, total - window_cells(traits)))


def _extends(contents: SlotContents, prompt: Tokens, common: int, traits: EngineTraits) -> bool:
    """Whether the state can be used up to `common` without a checkpoint."""
    if traits.memory is Memory.SWA:
        return common > traits.n_swa and common > contents.total - contents.slack
    return common == contents.total and len(prompt) > common


def continues(hash_chain: Sequence[bytes], contents: SlotContents | None) -> bool:
    """Whether a request begins with all that was sent to write this state: tools, system, messages."""
    return succeeds(hash_chain, contents) and contents is not None and hash_chain[0] == contents.hash_chain[0]


def succeeds(hash_chain: Sequence[bytes], contents: SlotContents | None) -> bool:
    """Whether its messages begin with all of this state's, whatever stands before them.

    Then it is the next turn of the same conversation, or one of a sub-agent that knows what was said.
    """
    # The first digest is what stands before the messages.
    if contents is None or len(contents.hash_chain) < 2:
        return False
    last = len(contents.hash_chain) - 1  # digests are chained: equal at one place, equal before it
    return last < len(hash_chain) and hash_chain[last] == contents.hash_chain[last]


def shared_messages(hash_chain: Sequence[bytes], contents: SlotContents | None) -> int:
    """How many first messages a request has in common with those that wrote this state."""
    pairs = zip(hash_chain[1:], contents.hash_chain[1:] if contents else (), strict=False)
    return sum(1 for one, other in pairs if one == other)


# -- the engine's RAM prompt cache (engine.md 4) ---------------------------------------------------------

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
