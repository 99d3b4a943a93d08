"""The contents of a slot, a snapshot or the engine's RAM prompt cache, and how much a new prompt reuses.

`reuse` mirrors the engine's own decision (engine.md section 5): it is the prediction of `cache_n`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, NewType

from slotkeeper.scheduler.prompts.tokens import EMPTY, Tokens
from slotkeeper.scheduler.slots.engine_model import (
    Checkpoint,
    EngineTraits,
    Memory,
    after_prefill,
    checkpoints_last,
    engine_goes_back_to,
    keeps_checkpoints,
    newest_usable,
    window_cells,
)
from slotkeeper.scheduler.types import RequestId

SnapshotId = NewType("SnapshotId", str)


class Tier(StrEnum):
    """Where a snapshot is stored."""

    HOT = "hot"  # in the engine's --slot-save-path: it can be restored at once
    COLD = "cold"  # elsewhere: it must be copied to the hot tier first


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One file that an engine wrote and that we read back and found complete.

    `checkpoints` are the tokens of the checkpoints in the file, in its order; older builds write none.
    """

    id: SnapshotId
    fingerprint: str  # only an engine with the same one may load it
    tokens: Tokens
    size: int  # bytes of the file
    checkpoints: tuple[int, ...] = ()
    repaired: bool = False  # the window's cell table was repaired, so that the state can be extended (T4)
    draft: bool = False  # its checkpoints carry the draft model's state
    tier: Tier = Tier.HOT
    created: float = 0.0  # seconds, the clock of the events
    used: float = 0.0
    restores: int = 0  # restores that saved tokens, by the engine's count
    shared: bool = False  # the beginning of several prompts, or likely to be
    golden: bool = False  # it was restored as a shared beginning: it is evicted after all others
    turns: int = 0  # turns of its conversation that we have seen
    cold_bytes: int | None = None  # what counts for it in the cold tier; None: all

    @property
    def counts(self) -> int:
        """The bytes that count for it in its tier: a cold tier stores once what states have in common."""
        return self.size if self.tier is Tier.HOT or self.cold_bytes is None else self.cold_bytes

    def __repr__(self) -> str:
        cuts = f" cuts {list(self.checkpoints)}" if self.checkpoints else ""
        return f"<Snapshot {self.id} {len(self.tokens)} tokens {self.size} bytes {self.tier}{cuts}>"


# -- the contents of one sequence state ------------------------------------------------------------------

MAX_PAUSES: Final = 8  # of one conversation that are remembered
RESTORED: Final = 0  # the task number of a restored checkpoint: no task of ours made it
EDIT_AFTER_SECONDS: Final = 3.0  # without a request; a tool loop returns sooner
HALF_LIFE: Final = 900.0  # seconds after which an unused conversation is half as likely to return


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotContents:
    """The contents of a slot, or of an entry in the engine's RAM prompt cache."""

    tokens: Tokens = EMPTY  # the known ids, from the first on
    opaque: int = 0  # tokens after them that the engine reports and whose ids we do not know
    checkpoints: tuple[Checkpoint, ...] = ()
    # The checkpoints that would exist if the engine had dropped none; see `evidence`.
    possible: tuple[Checkpoint, ...] = ()
    slack: int = 0  # SWA: tokens that can be cut off the end without a checkpoint
    floor: int = 0  # --swa-full: below it the window is missing, although the engine assumes it (T9)
    hash_chain: tuple[bytes, ...] = ()  # the messages, as chained digests
    following: Tokens | None = None  # the beginning of the next turn's prompt
    likely: float = 0.0  # the chance that the next turn begins with the reply; 0 for one that broke off
    sure: bool = False  # the next turn's prompt is known to begin with exactly these contents
    foreseen: bool = False  # nothing more will be learned about how the next turn begins
    given_up: int = 0  # tokens of its own that were given up for `following`
    request: RequestId | None = None  # the request that wrote it last
    calls_tools: bool | None = None  # whether its answer asked for tools; None: not known
    turns: int = 0  # how often it was continued
    used: float = 0.0  # seconds, the clock of the events
    pauses: tuple[float, ...] = ()  # seconds between an answer and the next turn, the latest last
    from_file: bool = False  # restored from a file without checkpoints: no cut before that file's end
    rough: bool = False  # its exact length is not known: the engine's next count decides

    @property
    def total(self) -> int:
        return len(self.tokens) + self.opaque

    def chance(self, now: float) -> float:
        """Return the chance of being used again, which fades with time; 0 if no request of ours wrote it."""
        faded: float = 2.0 ** (-max(0.0, now - self.used) / HALF_LIFE)
        return faded if self.turns else 0.0

    def pauses_until(self, arrived_at: float | None) -> tuple[float, ...]:
        """Return the pauses of a conversation whose next turn arrived then.

        None: it is still expected. Work for a turn that has arrived is no pause either.
        """
        if arrived_at is None or arrived_at < self.used:
            return self.pauses
        return (*self.pauses, arrived_at - self.used)[-MAX_PAUSES:]

    def known_as(self, tokens: Tokens) -> SlotContents:
        """Return the same state with more of its ids known. Its length does not change."""
        if not self.opaque:
            return self
        known = tokens.cut(0, self.total).within(self.tokens.space)
        return replace(self, tokens=known, opaque=self.total - len(known))

    def followed_by(self, tokens: Tokens | None, chance: float) -> SlotContents:
        """Return the same state with the beginning of the next turn; None: it stays unknown."""
        if tokens is None:
            return replace(self, likely=chance, foreseen=True)
        tokens = tokens.within(self.tokens.space)
        there = tokens == self.tokens and not self.opaque
        following = None if there else tokens
        return replace(self, following=following, likely=chance, sure=there, foreseen=True)

    def seen_as(self, tokens: Tokens, checkpoints: Sequence[int] | None) -> SlotContents:
        """Return the same state as its file shows it; `checkpoints` is None if files carry none."""
        known = {c.at: c for c in self.checkpoints}
        kept = (
            self.checkpoints
            if not checkpoints
            else tuple(known.get(at, Checkpoint(at, RESTORED)) for at in checkpoints)
        )
        known_as = tokens.within(self.tokens.space)
        return replace(self, tokens=known_as, opaque=0, checkpoints=kept, rough=False)

    def relisted(self, traits: EngineTraits) -> SlotContents:
        """Return the same state with the checkpoints that an engine of these (corrected) traits keeps."""
        made = self.possible if self.possible and checkpoints_last(traits) else self.checkpoints
        kept = made[-traits.checkpoint_cap :] if keeps_checkpoints(traits) else ()
        return replace(self, checkpoints=kept)

    def shrunk(self, total: int) -> SlotContents:
        """Return the same state cut to `total` tokens, which is the engine's own count."""
        known = self.tokens.cut(0, total)
        left = tuple(c for c in self.checkpoints if c.at <= total)
        return replace(self, tokens=known, opaque=total - len(known), checkpoints=left, rough=False)


def restored(
    snapshot: Snapshot, traits: EngineTraits, *, request: RequestId | None = None, now: float
) -> SlotContents:
    """Return a slot's contents after a restore of this file (engine.md 2.6).

    The engine loads the file's last checkpoints, as many as its list may have.
    """
    carried = snapshot.checkpoints if _comes_with_checkpoints(traits) else ()
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
    # A repaired window is one position longer than a bare one, so that it can be extended.
    return replace(bare(state, traits), slack=1 if snapshot.repaired else 0)


def bare(state: SlotContents, traits: EngineTraits) -> SlotContents:
    """Return the state after a copy to a file or the RAM cache and back: a window loses what precedes it."""
    cut_short = traits.memory is Memory.SWA and traits.swa_full and state.total > traits.n_swa
    return replace(state, slack=0, floor=state.total - 1 if cut_short else 0)


def as_file(state: SlotContents, traits: EngineTraits) -> SlotContents:
    """Return the state as a restore of its file will give it."""
    return bare(state if _comes_with_checkpoints(traits) else replace(state, checkpoints=()), traits)


def cut_to(contents: SlotContents, tokens: Tokens, traits: EngineTraits) -> SlotContents:
    """Return the state after a prefill of `tokens`, with which it begins. Any task may cost checkpoints."""
    kept = reuse(contents, tokens, traits)
    left = after_prefill(
        contents.checkpoints,
        reuse=kept,
        end=len(tokens),
        user_starts=(),
        task=1 + max((c.task for c in contents.checkpoints), default=RESTORED),
        traits=traits,
        first=first_kept(contents, kept, traits),
    )
    return replace(contents, tokens=tokens, opaque=0, checkpoints=left)


def _comes_with_checkpoints(traits: EngineTraits) -> bool:
    """Whether the engine loads checkpoints from a file, unless it was seen that the file has none."""
    return keeps_checkpoints(traits) and traits.files_carry is not False


def reuse(contents: SlotContents | None, prompt: Tokens, traits: EngineTraits) -> int:
    """Return how many tokens of `prompt` the engine will not compute again if it extends this state."""
    if contents is None or contents.total == 0 or len(prompt) < 2:
        return 0
    common = min(prompt.lcp(contents.tokens), len(prompt) - 1)  # the engine evaluates at least one token
    if traits.cuttable:
        return common if common >= contents.floor else 0
    if _extends(contents, prompt, common, traits):
        return common
    return newest_usable(contents.checkpoints, common, traits)


def unsafe(contents: SlotContents | None, prompt: Tokens, traits: EngineTraits) -> bool:
    """Whether the engine would give wrong answers from this state, so that it must be erased first.

    The engine would cut the state where its window is missing (T9), or go back to a checkpoint of other
    tokens (T11). If slots cannot be erased, T11 is left to the engine, as without us.
    """
    if contents is None or not (contents.floor or any(c.stale for c in contents.checkpoints)):
        return False  # nearly always; it avoids a comparison of the prompts
    common = min(prompt.lcp(contents.tokens), len(prompt) - 1)
    if contents.floor:
        return contents.floor + 1 - traits.n_swa < common < contents.floor
    if traits.cuttable or not traits.slot_files or _extends(contents, prompt, common, traits):
        return False
    found = engine_goes_back_to(contents.checkpoints, common, traits)
    return found is not None and found.stale


def goes_on_from(contents: SlotContents, traits: EngineTraits) -> int:
    """Return the token at which a file of this state should end, so that the next turn can reuse the file.

    It is the end of the state if a file can be cut as the slot can, or if the next turn is known to extend
    the state. Otherwise it is one token behind the newest checkpoint before the place where the next turn
    diverges. As long as the form in which the reply comes back is unknown, that is the last prompt's end.
    """
    if not traits.files_only_extend or contents.sure:
        return contents.total
    common = contents.total
    if contents.following is not None:
        common = contents.tokens.lcp(contents.following)
        if common == contents.total:
            return contents.total
    tokens = contents.tokens
    at = max((c.at for c in contents.checkpoints if c.at <= common and tokens.may_end(c.at + 1)), default=0)
    return at + 1 if 0 < at < min(len(contents.tokens), contents.total - 1) else contents.total


def first_kept(contents: SlotContents | None, kept: int, traits: EngineTraits) -> int:
    """Return the first position that a sliding window holds after a cut back to `kept` tokens."""
    if contents is None or kept == 0 or traits.cuttable or traits.memory is not Memory.SWA:
        return 0
    if kept > contents.total - contents.slack:
        return max(0, contents.total - contents.slack - traits.n_swa)
    return max(0, kept + 1 - traits.n_swa)  # from a checkpoint, which has the bare window


def slack(total: int, first: int, traits: EngineTraits) -> int:
    """Return how many tokens can be cut off `total` with a sliding window that begins at `first`."""
    if traits.memory is not Memory.SWA:
        return 0
    return max(0, total - traits.n_swa - max(first, total - window_cells(traits)))


def _extends(contents: SlotContents, prompt: Tokens, common: int, traits: EngineTraits) -> bool:
    """Whether the state can be used up to `common` without a checkpoint."""
    if traits.memory is Memory.SWA:
        return common > traits.n_swa and common > contents.total - contents.slack
    return common == contents.total and len(prompt) > common


def continues(hash_chain: Sequence[bytes], contents: SlotContents | None) -> bool:
    """Whether a request begins with the whole request that wrote this state: tools, system, messages."""
    return succeeds(hash_chain, contents) and contents is not None and hash_chain[0] == contents.hash_chain[0]


def succeeds(hash_chain: Sequence[bytes], contents: SlotContents | None) -> bool:
    """Whether a request's messages begin with all messages of this state; tools and system may differ.

    Then it is the next turn of the same conversation, or of a sub-agent that got the conversation's messages.
    """
    # The first digest is of the tools and system text before the messages.
    if contents is None or len(contents.hash_chain) < 2:
        return False
    last = len(contents.hash_chain) - 1  # digests are chained: equal at one place, equal before it
    return last < len(hash_chain) and hash_chain[last] == contents.hash_chain[last]


def replaces(hash_chain: Sequence[bytes], contents: SlotContents | None) -> bool:
    """Whether a request has another last message where the one that wrote this state had its own: an edit."""
    ours = contents.hash_chain if contents else ()
    return 2 < len(ours) == len(hash_chain) and ours[-2] == hash_chain[-2] and ours[-1] != hash_chain[-1]


def edits(hash_chain: Sequence[bytes], contents: SlotContents, now: float) -> bool:
    """Whether a user wrote another last message in place of the state's own, and will seldom return to it.

    It may be a sub-agent instead, while the agent to which the state belongs is at work: until that one has
    been silent for EDIT_AFTER_SECONDS or has answered without asking for tools.
    """
    # Of one image, several things are asked in turn: that is no edit.
    at_once = contents.calls_tools is False and not contents.tokens.chunks
    return replaces(hash_chain, contents) if at_once else edits_later(hash_chain, contents, now)


def edits_later(hash_chain: Sequence[bytes], contents: SlotContents, now: float) -> bool:
    """Whether it is an edit because the state's conversation has been silent for EDIT_AFTER_SECONDS."""
    return replaces(hash_chain, contents) and now - contents.used > EDIT_AFTER_SECONDS


def shared_messages(hash_chain: Sequence[bytes], contents: SlotContents | None) -> int:
    """Return how many first messages a request has in common with the request that wrote this state."""
    pairs = zip(hash_chain[1:], contents.hash_chain[1:] if contents else (), strict=False)
    return sum(1 for one, other in pairs if one == other)


# -- the engine's RAM prompt cache (engine.md 4) ---------------------------------------------------------

RAM_ENTRIES: Final = 64  # the engine's limit is in bytes, which we cannot see; a wrong guess is corrected
KEEP: Final = 0.5  # if less than this share of a slot is kept, the engine saves it and searches the cache
LOAD: Final = 0.25  # an entry must keep at least this share of itself to be loaded


def parks(contents: SlotContents | None, traits: EngineTraits, common: int = 0, length: int = 1) -> bool:
    """Whether a pinned task of `length` tokens makes the engine save this slot; an empty one never (T6).

    If the slot is not similar enough to be chosen, the engine acts as if nothing of it were kept.
    """
    if not traits.ram_cache or traits.similarity == 0 or not contents or contents.total == 0:
        return False
    return common / contents.total < KEEP or common / max(1, length) <= traits.similarity


def better(contents: SlotContents | None, ram: Sequence[SlotContents], prompt: Tokens) -> SlotContents | None:
    """Return the cache entry that the engine would load; it must exceed the slot in both shares."""
    common = prompt.lcp(contents.tokens) if contents else 0
    keep = common / contents.total if contents and contents.total else -1.0
    similar = common / max(1, len(prompt))
    best = None
    for entry in ram:
        shared = prompt.lcp(entry.tokens)
        entry_keep, entry_similar = shared / max(1, entry.total), shared / max(1, len(prompt))
        if entry_keep >= LOAD and entry_keep > keep and entry_similar > similar:
            keep, similar, best = entry_keep, entry_similar, entry
    return best


def contains(outer: SlotContents, inner: SlotContents) -> bool:
    """Whether all tokens of `inner` are in `outer`.

    The unknown tokens of a reply are not assumed equal to the tokens after the same prompt in another state:
    the reply may have come back changed, or draft tokens may follow its end.
    """
    theirs, ours = outer.tokens.packed, inner.tokens.packed
    if not (theirs.startswith(ours) or ours.startswith(theirs)):
        return False  # nearly always; it saves the calls below
    if outer.total == inner.total:  # the same tokens, of which perhaps fewer are known
        return outer.tokens.begins_with(inner.tokens) or inner.tokens.begins_with(outer.tokens)
    return outer.total > inner.total and not inner.opaque and outer.tokens.begins_with(inner.tokens)


def publish(ram: list[SlotContents], contents: SlotContents, traits: EngineTraits) -> None:
    """Copy a state into the RAM cache: not if an entry contains it; entries that it contains are dropped."""
    if contents.total == 0:
        return
    ours, contained = contents.tokens.packed, []
    for place, entry in enumerate(ram):
        theirs = entry.tokens.packed
        if not (theirs.startswith(ours) or ours.startswith(theirs)):  # nearly all: it saves the calls below
            continue
        if contains(entry, contents):  # the engine keeps its entry; we may have learnt more of its ids
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
