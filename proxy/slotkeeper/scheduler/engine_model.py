"""What an engine can reuse: the facts about its model and flags, and where it has context checkpoints.

The engine does not report its checkpoints, so this mirrors engine.md section 3, which
tells the two builds apart. A checkpoint at `at` holds the state after the first
`at` tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, Self

from slotkeeper.scheduler.media import Chunk
from slotkeeper.scheduler.types import UNKNOWN, Markers, Tokens


class Memory(StrEnum):
    """How a sequence's state can be cut."""

    DENSE = "dense"  # a plain KV cache: at any token
    SWA = "swa"  # sliding window: near the end, else at a checkpoint
    HYBRID = "hybrid"  # attention and recurrent layers: only at the end or at a checkpoint
    RECURRENT = "recurrent"  # recurrent layers only: the same
    UNKNOWN = "unknown"  # not read: treated as hybrid, the careful choice


class Known(StrEnum):
    """How the value of one of an engine's flags is known."""

    DEFAULT = "default"  # not known: what a stock llama-server does
    FLAGS = "flags"  # from its command line
    CANARY = "canary"  # tried out on an engine that was not used yet
    BATCHES = "batches"  # by where it cut a prefill of ours into batches
    KEPT = "kept"  # a checkpoint was used that another value would have thrown away
    MISSED = "missed"  # a checkpoint was gone that this value explains
    UNFOUND = "unfound"  # the RAM cache did not hold what it would otherwise have held
    WIPED = "wiped"  # idle slots were emptied by a task in another
    FAILED = "failed"  # a request failed for lack of cells before its slot was full
    HELD = "held"  # slots hold more together than one buffer has


FLAGS: Final[Mapping[str, str]] = MappingProxyType(  # fields that a flag decides, and /props does not show
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
class Told:
    """One flag."""

    flag: str
    value: float | bool  # of --cache-ram and the like: whether it is on
    how: Known


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """The facts of one engine. Defaults are those of a stock llama-server (engine.md 0, 11)."""

    n_slots: int = 1
    n_ctx: int = 0  # tokens per slot; 0 = not known
    memory: Memory = Memory.UNKNOWN
    n_swa: int = 0  # tokens of the sliding window
    swa_full: bool = False  # --swa-full: SWA behaves like dense
    n_batch: int = 2048
    n_ubatch: int = 512
    checkpoint_cap: int = 32  # --ctx-checkpoints
    checkpoint_min_step: int = 8192  # --checkpoint-min-step
    eager_thinning: bool = True  # b10434 thins checkpoints at every task, later builds when full (T7)
    similarity: float = 0.1  # --slot-prompt-similarity
    ram_cache: bool = True  # --cache-ram is not 0
    idle_copy: bool = True  # --cache-idle-slots
    pool_cells: int = 0  # of the buffer that --kv-unified shares, where a slot may not have all; 0 = n_ctx
    unified: bool = False  # --kv-unified: with idle_copy, a task wipes every other idle slot (T6)
    speculative: bool = False
    user_start: tuple[tuple[int, ...], ...] = ()  # token sequences that open a user message
    markers: Markers = UNKNOWN  # what opens messages in its chat template
    slot_files: bool = False  # slots can be saved to a folder that we read and write as well
    state_version: int = 0  # of its slot files, which is what they fit into; 0 = none was seen
    files_carry: bool | None = None  # whether its slot files carry checkpoints; None = not seen yet
    token_bytes: int = 0  # of a token in a slot file, by the model's header; 0 = not known
    fingerprint: str = ""  # of all that a slot file must fit; empty = not known, so no file is offered
    projector: str = ""  # what it makes of images, which files with images must fit as well; empty = nothing
    # Of `FLAGS`, how those are known that are not taken to be the defaults.
    knowledge: Mapping[str, Known] = field(default_factory=lambda: MappingProxyType({}), compare=False)

    @property
    def cuttable(self) -> bool:
        """Whether a slot can be rolled back to any token."""
        return self.memory is Memory.DENSE or (self.memory is Memory.SWA and self.swa_full)

    @property
    def files_only_extend(self) -> bool:
        """Whether a slot file serves only prompts that extend it: it carries no checkpoint to cut it at."""
        return not self.cuttable and self.files_carry is False

    @property
    def snapshots(self) -> bool:
        """Whether states can be kept in files and offered again."""
        return self.slot_files and self.state_version > 0 and bool(self.fingerprint)

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Of all files that it can load: those of texts, and those with images."""
        return (self.fingerprint, self._with_images) if self.projector else (self.fingerprint,)

    def fingerprint_of(self, tokens: Tokens) -> str:
        """That of files with these tokens."""
        return self._with_images if tokens.chunks else self.fingerprint

    @property
    def _with_images(self) -> str:
        return f"{self.fingerprint}-{self.projector}" if self.fingerprint and self.projector else ""

    def known(self, name: str) -> Known:
        """How this field's value is known."""
        return self.knowledge.get(name, Known.DEFAULT)

    def told(self) -> tuple[Told, ...]:
        """Every flag that decides something, as far as it is known."""
        return tuple(
            Told(flag=flag, value=getattr(self, name), how=self.known(name)) for name, flag in FLAGS.items()
        )

    @property
    def guessed(self) -> bool:
        """Whether the flags that decide about checkpoints were not read: evidence may correct them."""
        return self.known("checkpoint_cap") is not Known.FLAGS

    @property
    def checkpoints_in_doubt(self) -> bool:
        """Whether it needs checkpoints, and evidence may correct how many it keeps, and for how long."""
        return self.guessed and not self.cuttable

    @property
    def files_carry_drafts(self) -> bool:
        """Whether a file's checkpoints bring a draft model's state back."""
        return self.speculative and bool(self.files_carry)

    def learned(self, how: Known, **values: Any) -> Self:
        """The traits with these flags known. What was read from the command line stays."""
        open_to = {
            name: value
            for name, value in values.items()
            if how is Known.FLAGS or self.known(name) is not Known.FLAGS
        }
        return self.corrected(how, **open_to)

    def corrected(self, how: Known, **values: Any) -> Self:
        """The traits with these values, whatever was believed before."""
        knowledge = MappingProxyType({**self.knowledge, **dict.fromkeys(values, how)})
        return replace(self, **values, knowledge=knowledge)


# -- context checkpoints: where it makes them, which it throws away --------------------------------------

TAIL: Final = 4  # the engine cuts its last batch this many tokens before the prompt's end
MOST: Final = 256  # in a list: more are not believed of any engine
CELLS: Final = 256  # a sliding layer's cache is a multiple of so many cells


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A place to which a sequence state can be cut back."""

    at: int  # tokens
    task: int  # our count of tasks on this slot: thinning spares those of the running task
    first: int = 0  # SWA: the first position that the slot's window still held when this was made
    stale: bool = False  # its last token is another than the state's: from it answers are wrong (T11)


def keeps_checkpoints(traits: EngineTraits) -> bool:
    return not traits.cuttable and traits.checkpoint_cap > 0


def checkpoints_last(traits: EngineTraits) -> bool:
    """Whether they outlive the next task: older builds thin them at each one, unless told otherwise (T7)."""
    return keeps_checkpoints(traits) and not (traits.eager_thinning and traits.checkpoint_min_step > 0)


def generous(traits: EngineTraits) -> EngineTraits:
    """The traits of an engine that throws no checkpoint away."""
    return replace(traits, eager_thinning=False, checkpoint_min_step=0, checkpoint_cap=MOST)


def survivors(checkpoints: Sequence[Checkpoint], reuse: int, traits: EngineTraits) -> tuple[Checkpoint, ...]:
    """What is left after the slot was cut back to `reuse` tokens: pos_max (= at - 1) <= reuse.

    One that is a token farther on survives, though that token is another now (T11). A window is not harmed:
    its last token is computed again.
    """
    left = (c for c in checkpoints if c.at - 1 <= reuse)
    if traits.memory is Memory.SWA:
        return tuple(left)
    return tuple(replace(c, stale=True) if c.at > reuse else c for c in left)


def engine_goes_back_to(
    checkpoints: Sequence[Checkpoint], common: int, traits: EngineTraits
) -> Checkpoint | None:
    """The checkpoint that the engine takes for a prompt that parts at `common`; None: it computes all of it.

    It takes the last one of its list that will do, which is not always the one farthest on.
    """
    if traits.memory is Memory.SWA:
        needed = common - traits.n_swa
        usable = (c for c in reversed(checkpoints) if c.at - 1 <= common and not 0 < c.first >= needed)
    else:
        usable = (c for c in reversed(checkpoints) if c.at <= common)
    return next(usable, None)


def newest_usable(checkpoints: Sequence[Checkpoint], common: int, traits: EngineTraits) -> int:
    """Tokens the engine keeps when it must go back to a checkpoint at or below `common`; 0 if none."""
    found = engine_goes_back_to(checkpoints, common, traits)
    if found is None or found.stale:
        return 0
    # The window's last token is computed again: one token less is kept.
    return found.at - 1 if traits.memory is Memory.SWA else found.at


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
    images: Sequence[Chunk] = (),
) -> tuple[Checkpoint, ...]:
    """The list after a prompt of `end` tokens was evaluated from `reuse` on.

    `first` is the first position that a sliding window holds before that; `images` are those of the prompt.
    """
    if not keeps_checkpoints(traits):
        return ()
    kept = list(survivors(checkpoints, reuse, traits))
    last_user = user_starts[-1] if user_starts else -1
    starts = set(user_starts)
    at = reuse
    while at < end:
        stop = reach = _batch_end(kept, at, end, user_starts, traits)
        if image := _image_in(images, at, stop):
            reach, stop = max(at, image.start), _cut_behind(image, end, user_starts, traits)
        near_end = reach > end - traits.n_ubatch
        wanted = near_end or at == last_user or _far_enough(kept, at, traits)
        if at > 0 and (at in starts or near_end) and wanted:
            _add(kept, Checkpoint(at, task, max(first, at - window_cells(traits))), traits)
        at = stop
    return tuple(kept)


def _far_enough(kept: Sequence[Checkpoint], at: int, traits: EngineTraits) -> bool:
    """Whether a checkpoint there would keep the least distance from the last one."""
    return not kept or at > kept[-1].at + traits.checkpoint_min_step


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
        if start == user_starts[-1] or _far_enough(kept, start, traits):
            return start
    return stop


def _image_in(images: Sequence[Chunk], at: int, stop: int) -> Chunk | None:
    """The first image that a batch from `at` to `stop` would meet."""
    return next((image for image in images if at < image.end and image.start < stop), None)


def _cut_behind(image: Chunk, end: int, user_starts: Sequence[int], traits: EngineTraits) -> int:
    """Where the engine cuts next behind an image, so that the batch after the cut can leave a checkpoint.

    An image is computed apart, and the batch behind it leaves no checkpoint where it begins (engine.md 14).
    """
    cuts = (*user_starts, end - TAIL - traits.n_ubatch, end - TAIL, image.end + traits.n_batch)
    return min((cut for cut in cuts if image.end <= cut < end), default=end)


def _add(kept: list[Checkpoint], new: Checkpoint, traits: EngineTraits) -> None:
    _make_room(kept, new.task, traits)
    if not traits.eager_thinning:  # newer builds replace the one at the same place
        kept[:] = [c for c in kept if c.at != new.at]
    kept.append(new)


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


# -- tokens that make an engine do what it would not do otherwise ----------------------------------------


def foreign_token(prompt: Tokens) -> Tokens:
    """One valid token that does not begin the prompt: the slot must look worthless to the engine."""
    first = prompt[0]
    return Tokens([next((token for token in prompt if token != first and token >= 0), first)])


def marked(tokens: Tokens) -> Tokens:
    """The same with foreign tokens behind, so that the engine keeps a checkpoint at their end.

    A prompt that continues there diverges from the foreign ones and rolls back to it and its drafts.
    """
    return tokens + Tokens([tokens[0]] * TAIL)


def unmarked(tokens: Tokens) -> Tokens:
    """Without the foreign tokens, where there are some."""
    bare = tokens.cut(0, max(0, len(tokens) - TAIL))
    return bare if bare and tokens == marked(bare) else tokens


def is_marked(tokens: Tokens) -> bool:
    return unmarked(tokens) is not tokens
