"""What an engine does, as evidence of its flags (engine.md 3, T7).

A wrong belief costs tokens, never an answer; so what is seen is believed at once where only one flag explains
it, and after a second time where something else could.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from slotkeeper.scheduler.engine_model import MOST, TAIL, Checkpoint, EngineTraits, Known, Memory
from slotkeeper.scheduler.slot_contents import SlotContents

SIZES: Final = 32  # what batch sizes are multiples of; else two slots had to share a batch
STRIKES: Final = 2


def by_batches(traits: EngineTraits, *, cached: int, end: int, cuts: Collection[int] | None) -> EngineTraits:
    """What a prefill of ours from `cached` to `end` tells, by where its batches ended.

    The engine ends one where it makes a checkpoint: TAIL tokens before the end, and one --ubatch-size before
    that. All others are as long as --batch-size.
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
    """With these sizes raised to what must be, if they were believed to be smaller."""
    higher = {
        name: 1 << (size - 1).bit_length() for name, size in sizes.items() if size > getattr(traits, name)
    }
    return traits.learned(Known.BATCHES, **higher) if higher else traits


@dataclass(slots=True)
class Doubts:
    """What was seen of one engine's checkpoints, as long as it is up."""

    used: int = 0  # so many were in the list at least, behind and with one that was used
    missed: int = 0  # times in a row that one was gone

    def by_reuse(
        self, traits: EngineTraits, contents: SlotContents, *, predicted: int, cached: int
    ) -> EngineTraits:
        """What an answer tells for which a slot had to go back to a checkpoint.

        `contents` is what the slot held, `predicted` and `cached` tokens that were to be reused, and were.
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
        if behind <= max(1, self.used) or (cached and cached not in listed):
            return traits  # something else than a list that is too short
        return self._count_missed(traits, behind - 1)

    def by_file(self, traits: EngineTraits, contents: SlotContents, listed: Sequence[int]) -> EngineTraits:
        """What the list of checkpoints in a file tells that the engine wrote just now."""
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
        """A checkpoint was gone, which a list of `cap` would explain, or the longest one that was used."""
        self.missed += 1
        if self.missed < STRIKES:
            return traits
        self.missed = 0
        return traits.learned(Known.MISSED, checkpoint_cap=max(1, self.used, cap))


def _kept(traits: EngineTraits) -> EngineTraits:
    """A checkpoint was there that should have been thrown away."""
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
    """Tokens that are reused where the engine goes back to these checkpoints."""
    lost = 1 if traits.memory is Memory.SWA else 0
    return [checkpoint.at - lost for checkpoint in checkpoints]
