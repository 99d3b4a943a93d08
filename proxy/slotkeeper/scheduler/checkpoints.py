"""The engine's context checkpoints, as a model: where it makes them, which it throws away.

The engine does not report its checkpoints, so this mirrors engine.md section 3, which
tells the two builds apart. A checkpoint at `at` holds the state after the first
`at` tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from slotkeeper.scheduler.traits import EngineTraits, Memory

TAIL: Final = 4  # the engine cuts its last batch this many tokens before the prompt's end
MOST: Final = 256  # in a list: more are not believed of any engine
CELLS: Final = 256  # a sliding layer's cache is a multiple of so many cells


@dataclass(frozen=True, slots=True)
class Checkpoint:
    at: int  # tokens
    task: int  # our count of tasks on this slot: thinning spares those of the running task
    first: int = 0  # SWA: the first position that the slot's window still held when this was made


def keeps_checkpoints(traits: EngineTraits) -> bool:
    return not traits.cuttable and traits.checkpoint_cap > 0


def checkpoints_last(traits: EngineTraits) -> bool:
    """Whether they outlive the next task: older builds thin them at each one, unless told otherwise (T7)."""
    return keeps_checkpoints(traits) and not (traits.eager_thinning and traits.checkpoint_min_step > 0)


def generous(traits: EngineTraits) -> EngineTraits:
    """The traits of an engine that throws no checkpoint away."""
    return replace(traits, eager_thinning=False, checkpoint_min_step=0, checkpoint_cap=MOST)


def survivors(checkpoints: Sequence[Checkpoint], reuse: int) -> tuple[Checkpoint, ...]:
    """What is left after the slot was cut back to `reuse` tokens: pos_max (= at - 1) <= reuse."""
    return tuple(c for c in checkpoints if c.at - 1 <= reuse)


def newest_usable(checkpoints: Sequence[Checkpoint], common: int, traits: EngineTraits) -> int:
    """Tokens the engine keeps when it must go back to a checkpoint at or below `common`; 0 if none.

    It takes the last one of its list that will do, which is not always the one farthest on.
    """
    if traits.memory is Memory.SWA:  # the window's last token is computed again: one token less is kept
        needed = common - traits.n_swa
        usable = (c.at - 1 for c in reversed(checkpoints) if c.at - 1 <= common and not 0 < c.first >= needed)
    else:
        usable = (c.at for c in reversed(checkpoints) if c.at <= common)
    return next(usable, 0)


def window_cells(traits: EngineTraits) -> int:
    """Tokens that a sliding layer can hold: its window and one ubatch, rounded up."""
    return -(-(traits.n_swa + traits.n_ubatch) // CELLS) * CELLS


def after_prefill(
    checkpoints: Sequence[Checkpoint],
    *,
    reuse: int,
    end: int,
    user_starts: Sequence[int],
    task: int,
    traits: EngineTraits,
    first: int = 0,
) -> tuple[Checkpoint, ...]:
    """The list after a prompt of `end` tokens was evaluated from `reuse` on.

    `first` is the first position that a sliding window holds before that.
    """
    if not keeps_checkpoints(traits):
        return ()
    kept = list(survivors(checkpoints, reuse))
    last_user = user_starts[-1] if user_starts else -1
    starts = set(user_starts)
    at = reuse
    while at < end:
        stop = _batch_end(kept, at, end, user_starts, traits)
        near_end = stop > end - traits.n_ubatch
        spaced = not kept or at == last_user or near_end or at > kept[-1].at + traits.checkpoint_min_step
        if at > 0 and (at in starts or near_end) and spaced:
            _make_room(kept, task, traits)
            if kept and kept[-1].at == at and not traits.eager_thinning:
                kept.pop()  # newer builds replace the one at the same place
            kept.append(Checkpoint(at, task, max(first, at - window_cells(traits))))
        at = stop
    return tuple(kept)


def _batch_end(
    kept: Sequence[Checkpoint], at: int, end: int, user_starts: Sequence[int], traits: EngineTraits
) -> int:
    """Where the batch that begins at `at` ends: the next place at which the engine cuts."""
    stop = min(end, at + traits.n_batch)
    for cut in (end - TAIL - traits.n_ubatch, end - TAIL):
        if at < cut < stop:
            stop = cut
    following = bisect_left(user_starts, at + 1)
    for start in user_starts[following:]:
        if start >= stop:
            break
        if start == user_starts[-1] or not kept or start > kept[-1].at + traits.checkpoint_min_step:
            return start
    return stop


def _make_room(kept: list[Checkpoint], task: int, traits: EngineTraits) -> None:
    """Thin what stands too close (T7), then drop the oldest while the list is full."""
    if traits.eager_thinning or len(kept) + 1 >= traits.checkpoint_cap:
        index = 1
        while index < len(kept):
            if not traits.eager_thinning and len(kept) + 1 < traits.checkpoint_cap:
                break
            too_close = kept[index].at <= kept[index - 1].at + traits.checkpoint_min_step
            if kept[index].task != task and too_close:
                del kept[index]
            else:
                index += 1
    while kept and len(kept) >= traits.checkpoint_cap:
        del kept[0]
