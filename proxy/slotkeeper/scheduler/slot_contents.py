"""What one sequence state holds, and how much of it a new prompt can use.

`reuse` mirrors the engine's own decision (engine.md section 5): it is the prediction of `cache_n`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from slotkeeper.scheduler.checkpoints import (
    Checkpoint,
    checkpoints_last,
    keeps_checkpoints,
    newest_usable,
    window_cells,
)
from slotkeeper.scheduler.snapshots import Snapshot
from slotkeeper.scheduler.tokens import EMPTY, Tokens
from slotkeeper.scheduler.traits import EngineTraits, Memory
from slotkeeper.scheduler.types import RequestId

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
    """Whether the engine would cut this state where its window is gone, and give wrong answers (T9)."""
    if contents is None or contents.floor == 0:
        return False
    common = min(contents.tokens.lcp(prompt), len(prompt) - 1)
    return contents.floor + 1 - traits.n_swa < common < contents.floor


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
