"""Infers an engine's flags from its behaviour: which checkpoints it must have had (engine.md 3, T7).

A wrong inference costs tokens, never an answer. So one observation is enough if only one flag explains it; if
there is another explanation, a second observation is needed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from slotkeeper.scheduler.slots.engine_model import (
    MOST,
    TAIL,
    Checkpoint,
    EngineTraits,
    Known,
    Memory,
    SlotContents,
)

SIZES: Final = 32  # tokens; batch sizes are multiples of it, unless two slots shared a batch
STRIKES: Final = 2  # observations that are needed if there is another explanation


def by_batches(traits: EngineTraits, *, cached: int, end: int, cuts: Collection[int] | None) -> EngineTraits:
    """Learn from the batches of our own prefill from token `cached` to token `end`.

    `cuts` are the tokens at which its batches ended. The engine ends a batch where it makes a checkpoint:
    TAIL tokens before the end, and one --ubatch-size before that. All other batches have --batch-size tokens.
    """
    last = end - TAIL
    if cuts is None or traits.cuttable or traits.memory is Memory.UNKNOWN or last <= cached:
        return traits
    if last not in cuts:
        return traits.learned(Known.BATCHES, checkpoint_cap=0)
    inner = sorted(cut for cut in cuts if cached < cut < last)
    if not inner:
        return _at_least(traits, n_ubatch=last - cached)
    if (last - inner[-1]) % SIZES == 0:
        traits = traits.learned(Known.BATCHES, n_ubatch=last - inner[-1])
    first = inner[0] - cached
    if len(inner) == 1:
        return _at_least(traits, n_batch=first)
    return traits.learned(Known.BATCHES, n_batch=first) if first % SIZES == 0 else traits


def _at_least(traits: EngineTraits, **sizes: int) -> EngineTraits:
    """Raise each smaller size in the traits to the next power of two of the size seen."""
    higher = {
        name: 1 << (size - 1).bit_length() for name, size in sizes.items() if size > getattr(traits, name)
    }
    return traits.learned(Known.BATCHES, **higher) if higher else traits


@dataclass(slots=True)
class Doubts:
    """Observations of one engine's checkpoints while it is up."""

    used: int = 0  # checkpoints that the list held at least: one that was used, and those after it
    missed: int = 0  # times in a row that a checkpoint was gone

    def by_reuse(
        self, traits: EngineTraits, contents: SlotContents, *, predicted: int, cached: int
    ) -> EngineTraits:
        """Learn from an answer for which the slot had to go back to a checkpoint.

        `contents` is what the slot held. `predicted` tokens were expected to be reused, `cached` tokens were.
        """
        if not traits.checkpoints_in_doubt or predicted == contents.total:
            return traits
        if cached > predicted:
            return _kept(traits) if cached in _reusable(contents.possible, traits) else traits
        listed = _reusable(contents.checkpoints, traits)
        if predicted not in listed:
            return traits
        behind = len(listed) - listed.index(predicted)
        if cached == predicted:
            self.used, self.missed = max(self.used, behind), 0
            return traits
        if not cached and not self.used and behind == 1:
            return self._count_missed(traits)  # perhaps it keeps none at all
        if behind <= max(1, self.used) or (cached and cached not in listed):
            return traits  # a list that is too short does not explain this
        return self._count_missed(traits, behind - 1)

    def by_file(self, traits: EngineTraits, contents: SlotContents, listed: Sequence[int]) -> EngineTraits:
        """Learn from the list of checkpoints in a file that the engine has just written."""
        if not traits.checkpoints_in_doubt:
            return traits
        self.used = max(self.used, len(listed))
        if len(listed) > traits.checkpoint_cap:
            return traits.learned(Known.KEPT, checkpoint_cap=_doubled(traits.checkpoint_cap, len(listed)))
        mine = {c.at for c in contents.checkpoints}
        if len(mine) <= len(listed) or not mine.issuperset(listed):
            return traits
        return self._count_missed(traits)

    def _count_missed(self, traits: EngineTraits, cap: int = 0) -> EngineTraits:
        """Count a checkpoint that was gone. After STRIKES of them, the list's limit is lowered.

        The new limit is `cap`, or `used` if that is higher; 0 if no checkpoint was ever seen.
        """
        self.missed += 1
        if self.missed < STRIKES:
            return traits
        self.missed = 0
        return traits.learned(Known.MISSED, checkpoint_cap=max(self.used, cap))


def _kept(traits: EngineTraits) -> EngineTraits:
    """Learn from a checkpoint that was there although the engine should have dropped it."""
    if traits.eager_thinning and traits.checkpoint_min_step > 0:
        return traits.learned(Known.KEPT, checkpoint_min_step=0)
    return traits.learned(Known.KEPT, checkpoint_cap=_doubled(traits.checkpoint_cap))


def _doubled(cap: int, least: int = 1) -> int:
    while cap < MOST:
        cap = max(1, 2 * cap)
        if cap >= least:
            break
    return min(cap, MOST)


def _reusable(checkpoints: Sequence[Checkpoint], traits: EngineTraits) -> list[int]:
    """Return the tokens that are reused if the engine goes back to each of these checkpoints."""
    lost = 1 if traits.memory is Memory.SWA else 0
    return [checkpoint.at - lost for checkpoint in checkpoints]
