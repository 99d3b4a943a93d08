"""What an engine can reuse: facts about its model and flags, and where it has context checkpoints.

The engine does not report its checkpoints, so this module mirrors engine.md section 3, which also has the
differences between the two builds. A checkpoint at `at` holds the state after the first `at` tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, Self

from slotkeeper.scheduler.policies.adapters import Adapter, set_of
from slotkeeper.scheduler.prompts.tokens import UNKNOWN, Chunk, Markers, Tokens


class Memory(StrEnum):
    """Where the state of a sequence can be cut."""

    DENSE = "dense"  # a plain KV cache: at any token
    SWA = "swa"  # sliding window: near the end, else at a checkpoint
    HYBRID = "hybrid"  # attention and recurrent layers: only at the end or at a checkpoint
    RECURRENT = "recurrent"  # recurrent layers only: like HYBRID
    UNKNOWN = "unknown"  # not read: treated as HYBRID, which is the safe choice


class Known(StrEnum):
    """How we know the value of one of an engine's flags."""

    DEFAULT = "default"  # unknown: what a stock llama-server does
    FLAGS = "flags"  # from its command line
    CANARY = "canary"  # tried out on an engine before its first use
    BATCHES = "batches"  # from where it split a prefill of ours into batches
    KEPT = "kept"  # it used a checkpoint that another value would have discarded
    MISSED = "missed"  # a checkpoint was missing, which this value explains
    UNFOUND = "unfound"  # the RAM cache lacked what it should have held
    WIPED = "wiped"  # a task emptied idle slots
    FAILED = "failed"  # a request failed for lack of cells before its slot was full
    HELD = "held"  # idle slots together hold more than one buffer could


FLAGS: Final[Mapping[str, str]] = MappingProxyType(  # fields set by a flag that /props does not show
    {
        "swa_full": "--swa-full",
        "n_batch": "--batch-size",
        "n_ubatch": "--ubatch-size",
        "checkpoint_cap": "--ctx-checkpoints",
        "checkpoint_min_step": "--checkpoint-min-step",
        "similarity": "--slot-prompt-similarity",
        "ram_cache": "--cache-ram",
        "idle_copy": "--cache-idle-slots",
        "unified": "--kv-unified",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagSeen:
    """One flag, its value, and how we know it."""

    flag: str
    value: float | bool  # for --cache-ram and similar flags: whether it is on
    how: Known


STOCK_RAM_BYTES: Final = 8192 << 20  # of the RAM prompt cache, by default


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """The facts of one engine. The defaults are those of a stock llama-server (engine.md 0, 11)."""

    n_slots: int = 1
    n_ctx: int = 0  # tokens per slot; 0: unknown
    memory: Memory = Memory.UNKNOWN
    n_swa: int = 0  # tokens of the sliding window
    swa_full: bool = False  # --swa-full: SWA behaves like DENSE
    n_batch: int = 2048
    n_ubatch: int = 512
    checkpoint_cap: int = 32  # --ctx-checkpoints
    checkpoint_min_step: int = 8192  # --checkpoint-min-step
    eager_thinning: bool = True  # b10434 thins checkpoints at every task, later builds when full (T7)
    similarity: float = 0.1  # --slot-prompt-similarity
    ram_cache: bool = True  # --cache-ram is not 0
    ram_bytes: int = STOCK_RAM_BYTES  # size of that cache; 0: it has no limit
    idle_copy: bool = True  # --cache-idle-slots
    pool_cells: int = 0  # size of the --kv-unified buffer, if one slot cannot use all of it; 0: n_ctx
    unified: bool = False  # --kv-unified: with idle_copy, a task wipes every other idle slot (T6)
    speculative: bool = False  # it drafts tokens, by MTP or with a draft model
    user_start: tuple[tuple[int, ...], ...] = ()  # token sequences that open a user message
    markers: Markers = UNKNOWN  # what opens a message in its chat template
    slot_files: bool = False  # slots can be saved to a folder that we can read and write
    state_version: int = 0  # format of its slot files, which must match on restore; 0: no file seen yet
    files_carry: bool | None = None  # whether its slot files contain checkpoints; None: not seen yet
    token_bytes: int = 0  # size of one token in a slot file, by the model's header; 0: unknown
    checkpoint_bytes: int = 0  # size of one checkpoint, by the model's header; 0: unknown, or it has none
    fingerprint: str = ""  # of all that a slot file must match; empty: unknown, so no file is offered
    projector: str = ""  # of images: files with images must match it as well; empty: it sees no images
    adapters: tuple[Adapter, ...] = ()  # LoRA; which of them made a state is said by its space
    # How we know the fields in `FLAGS` that are not assumed to be defaults.
    knowledge: Mapping[str, Known] = field(default_factory=lambda: MappingProxyType({}), compare=False)

    @property
    def adapter_set(self) -> str:
        """The set of adapters with which requests are computed that name none."""
        return set_of(self.adapters)

    @property
    def cuttable(self) -> bool:
        """Whether a slot can be rolled back to any token."""
        return self.memory is Memory.DENSE or (self.memory is Memory.SWA and self.swa_full)

    @property
    def files_only_extend(self) -> bool:
        """Whether a slot file serves only prompts that extend it: it contains no checkpoint to cut it at."""
        return not self.cuttable and self.files_carry is False

    @property
    def snapshots(self) -> bool:
        """Whether states can be saved to files and restored."""
        return self.slot_files and self.state_version > 0 and bool(self.fingerprint)

    @property
    def largest_file(self) -> int:
        """The bytes of a file with a full slot and one checkpoint, by the model's header; 0: unknown."""
        return self.token_bytes and self.token_bytes * self.n_ctx + self.checkpoint_bytes

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Return the fingerprints of all files that it can load: of text, and with images."""
        return (self.fingerprint, self._with_images) if self.projector else (self.fingerprint,)

    def fingerprint_of(self, tokens: Tokens) -> str:
        """Return the fingerprint of files with these tokens."""
        return self._with_images if tokens.chunks else self.fingerprint

    @property
    def _with_images(self) -> str:
        return f"{self.fingerprint}-{self.projector}" if self.fingerprint and self.projector else ""

    def known(self, name: str) -> Known:
        """Return how the value of this field is known."""
        return self.knowledge.get(name, Known.DEFAULT)

    def flags_seen(self) -> tuple[FlagSeen, ...]:
        """Return every flag in `FLAGS` with its value and how we know it."""
        return tuple(
            FlagSeen(flag=flag, value=getattr(self, name), how=self.known(name))
            for name, flag in FLAGS.items()
        )

    @property
    def guessed(self) -> bool:
        """Whether the flags for checkpoints were not read, so that evidence may correct them."""
        return self.known("checkpoint_cap") is not Known.FLAGS

    @property
    def checkpoints_in_doubt(self) -> bool:
        """Whether the engine needs checkpoints, and evidence may correct their number and lifetime."""
        return self.guessed and not self.cuttable

    @property
    def files_carry_drafts(self) -> bool:
        """Whether the checkpoints in a file restore a draft model's state."""
        return self.speculative and bool(self.files_carry)

    def learned(self, how: Known, **values: Any) -> Self:
        """Return the traits with these values. A flag that was read from the command line keeps its value."""
        open_to = {
            name: value
            for name, value in values.items()
            if how is Known.FLAGS or self.known(name) is not Known.FLAGS
        }
        return self.corrected(how, **open_to)

    def corrected(self, how: Known, **values: Any) -> Self:
        """Return the traits with these values, whatever was known before."""
        knowledge = MappingProxyType({**self.knowledge, **dict.fromkeys(values, how)})
        return replace(self, **values, knowledge=knowledge)


# -- context checkpoints: where the engine makes them, which ones it discards ----------------------------

TAIL: Final = 4  # the engine ends its last batch this many tokens before the prompt's end
MOST: Final = 256  # checkpoints in one list; we assume that no engine keeps more
CELLS: Final = 256  # the cache of a sliding-window layer is a multiple of this number of cells


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A place to which the state of a sequence can be cut back."""

    at: int  # tokens
    task: int  # our count of tasks in this slot: thinning spares the checkpoints of the running task
    first: int = 0  # SWA: first position that the slot's window still held when the checkpoint was made
    stale: bool = False  # its last token differs from the state's: answers computed from it are wrong (T11)


def keeps_checkpoints(traits: EngineTraits) -> bool:
    return not traits.cuttable and traits.checkpoint_cap > 0


def checkpoints_last(traits: EngineTraits) -> bool:
    """Whether checkpoints survive the next task."""
    return keeps_checkpoints(traits) and not thins_at_each_task(traits)


def thins_at_each_task(traits: EngineTraits) -> bool:
    """Whether each task takes checkpoints of earlier ones, as in older builds by default (T7)."""
    return keeps_checkpoints(traits) and traits.eager_thinning and traits.checkpoint_min_step > 0


def generous(traits: EngineTraits) -> EngineTraits:
    """Return the traits of an engine that discards no checkpoint."""
    return replace(traits, eager_thinning=False, checkpoint_min_step=0, checkpoint_cap=MOST)


def survivors(checkpoints: Sequence[Checkpoint], reuse: int, traits: EngineTraits) -> tuple[Checkpoint, ...]:
    """Return the checkpoints left after the slot was cut back to `reuse` tokens: pos_max (= at - 1) <= reuse.

    A checkpoint one token further on survives too, although its last token has changed (T11). With a sliding
    window this does no harm, because the last token of a window is computed again.
    """
    left = (c for c in checkpoints if c.at - 1 <= reuse)
    if traits.memory is Memory.SWA:
        return tuple(left)
    return tuple(replace(c, stale=True) if c.at > reuse else c for c in left)


def engine_goes_back_to(
    checkpoints: Sequence[Checkpoint], common: int, traits: EngineTraits
) -> Checkpoint | None:
    """Return the checkpoint that the engine uses for a prompt that diverges at `common`.

    None: the engine computes the whole prompt. It uses the last usable one of its list, which is not always
    the one with the most tokens.
    """
    if traits.memory is Memory.SWA:
        needed = common - traits.n_swa
        usable = (c for c in reversed(checkpoints) if c.at - 1 <= common and not 0 < c.first >= needed)
    else:
        usable = (c for c in reversed(checkpoints) if c.at <= common)
    return next(usable, None)


def newest_usable(checkpoints: Sequence[Checkpoint], common: int, traits: EngineTraits) -> int:
    """Return how many tokens the engine keeps if it goes back to a checkpoint for `common`; 0 if none."""
    checkpoint = engine_goes_back_to(checkpoints, common, traits)
    if checkpoint is None or checkpoint.stale:
        return 0
    # With a sliding window, the last token is computed again, so one token less is kept.
    return checkpoint.at - 1 if traits.memory is Memory.SWA else checkpoint.at


def window_cells(traits: EngineTraits) -> int:
    """Return how many tokens a sliding-window layer holds: the window and one ubatch, rounded up."""
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
    images: Sequence[Chunk] = (),
) -> tuple[Checkpoint, ...]:
    """Return the checkpoints after a prompt of `end` tokens was evaluated from `reuse` on.

    `first` is the first position that a sliding window holds before that; `images` are those of the prompt.
    """
    if not keeps_checkpoints(traits):
        return ()
    kept, _ = prefilled(
        checkpoints,
        reuse=reuse,
        end=end,
        user_starts=user_starts,
        task=task,
        traits=traits,
        first=first,
        images=images,
    )
    return kept


def prefilled(
    checkpoints: Sequence[Checkpoint],
    *,
    reuse: int,
    end: int,
    user_starts: Sequence[int],
    task: int,
    traits: EngineTraits,
    first: int = 0,
    images: Sequence[Chunk] = (),
) -> tuple[tuple[Checkpoint, ...], tuple[int, ...]]:
    """Return the checkpoints as `after_prefill` does, and where the batches ended, in tokens."""
    if not keeps_checkpoints(traits):
        return (), (*range(reuse + traits.n_batch, end, traits.n_batch), end)
    kept = list(survivors(checkpoints, reuse, traits))
    last_user = user_starts[-1] if user_starts else -1
    starts = set(user_starts)
    at, ends = reuse, []
    while at < end:
        stop = reach = _batch_end(kept, at, end, user_starts, traits)
        if image := next((each for each in images if at < each.end and each.start < stop), None):
            reach, stop = max(at, image.start), _cut_behind(image, end, user_starts, traits)
        near_end = reach > end - traits.n_ubatch
        wanted = near_end or at == last_user or _far_enough(kept, at, traits)
        if at > 0 and (at in starts or near_end) and wanted:
            _add(kept, Checkpoint(at, task, max(first, at - window_cells(traits))), traits)
        at = stop
        ends.append(stop)
    return tuple(kept), tuple(ends)


def _far_enough(kept: Sequence[Checkpoint], at: int, traits: EngineTraits) -> bool:
    """Whether a checkpoint at `at` keeps the minimum distance from the last one."""
    return not kept or at > kept[-1].at + traits.checkpoint_min_step


def _batch_end(
    kept: Sequence[Checkpoint], at: int, end: int, user_starts: Sequence[int], traits: EngineTraits
) -> int:
    """Return where the batch that begins at `at` ends: at the next place where the engine splits."""
    stop = min(end, at + traits.n_batch)
    for cut in (end - TAIL - traits.n_ubatch, end - TAIL):
        if at < cut < stop:
            stop = cut
    following = bisect_left(user_starts, at + 1)
    for start in user_starts[following:]:
        if start >= stop:
            break
        if start == user_starts[-1] or _far_enough(kept, start, traits):
            return start
    return stop


def _cut_behind(image: Chunk, end: int, user_starts: Sequence[int], traits: EngineTraits) -> int:
    """Return where the engine cuts next behind an image, so that the next batch can leave a checkpoint.

    An image is computed apart, and the batch behind it leaves no checkpoint where it begins (engine.md 15).
    """
    cuts = (*user_starts, end - TAIL - traits.n_ubatch, end - TAIL, image.end + traits.n_batch)
    return min((cut for cut in cuts if image.end <= cut < end), default=end)


def _add(kept: list[Checkpoint], new: Checkpoint, traits: EngineTraits) -> None:
    _make_room(kept, new.task, traits)
    if not traits.eager_thinning:  # newer builds replace a checkpoint at the same place
        kept[:] = [c for c in kept if c.at != new.at]
    kept.append(new)


def _make_room(kept: list[Checkpoint], task: int, traits: EngineTraits) -> None:
    """Thin checkpoints that are too close (T7), then drop the oldest while the list is full."""
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


def user_starts(prompt: Tokens | None, traits: EngineTraits) -> Sequence[int]:
    """Return where user messages begin, in tokens. The engine prefers these places for checkpoints."""
    if prompt is None:
        return ()
    return sorted({at for opener in traits.user_start for at in prompt.find_all(Tokens(opener))})


# -- cells: one KV buffer for all slots (`kv_pool`) ------------------------------------------------------


def cells_of(traits: EngineTraits) -> int:
    """Return the cells of the buffer that all slots share; 0 if there is none, or if that is uncertain."""
    sure = traits.known("unified") is not Known.DEFAULT
    shared = traits.unified and sure and traits.n_slots > 1
    # A recurrent state takes one cell, whatever the length of its sequence.
    return traits.pool_cells or traits.n_ctx if shared and traits.memory is not Memory.RECURRENT else 0


def may_share(traits: EngineTraits) -> bool:
    """Whether its slots share a buffer, or may: the first request that fails for lack of cells shows it."""
    alone = not traits.unified and traits.known("unified") is not Known.DEFAULT
    return traits.n_slots > 1 and traits.memory is not Memory.RECURRENT and not alone


def wipes(traits: EngineTraits) -> bool:
    """Whether each task moves all idle slots to the RAM cache, so that they hold no cells (engine.md T6)."""
    return traits.unified and traits.ram_cache and traits.idle_copy


# -- foreign tokens: they make an engine load, or keep a checkpoint --------------------------------------


def foreign_token(prompt: Tokens) -> Tokens:
    """Return one valid token that does not begin the prompt, so that the engine finds nothing to reuse.

    If the prompt has no other id, it is the first one. The prompt must not be empty.
    """
    first = prompt[0]
    other = next((token for token in prompt if token != first and token >= 0), first)
    return Tokens([other]).within(prompt.space)


def marked(tokens: Tokens) -> Tokens:
    """Return the tokens with foreign ones appended, so that the engine keeps a checkpoint at their end.

    A prompt that continues from there diverges from the foreign tokens. The engine then goes back to that
    checkpoint, which includes the draft state.
    """
    return tokens + Tokens([tokens[0]] * TAIL)


def unmarked(tokens: Tokens) -> Tokens:
    """Return the tokens without appended foreign ones."""
    bare = tokens.cut(0, max(0, len(tokens) - TAIL))
    return bare if bare and tokens == marked(bare) else tokens


def is_marked(tokens: Tokens) -> bool:
    return unmarked(tokens) is not tokens
