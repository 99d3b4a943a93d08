"""What an engine can reuse: its traits as values, its context checkpoints, and the contents of its slots.

The engine does not report its checkpoints, so this module mirrors engine.md section 3, which also has the
differences between the two builds. A checkpoint at `at` holds the state after the first `at` tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, NewType, Self

from slotkeeper.scheduler.policies.adapters import Adapter, set_of
from slotkeeper.scheduler.prompts.tokens import EMPTY, UNKNOWN, Chunk, Markers, Tokens
from slotkeeper.scheduler.types import RequestId, Tier


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


# -- the contents of a slot, a snapshot or the engine's RAM prompt cache; and what a new prompt reuses --

# `reuse` mirrors the engine's own decision (engine.md section 5): it is the prediction of `cache_n`.


SnapshotId = NewType("SnapshotId", str)


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
    from_file: bool = False  # restored from a file without checkpoints: no cut before that file's end
    rough: bool = False  # its exact length is not known: the engine's next count decides

    @property
    def total(self) -> int:
        return len(self.tokens) + self.opaque

    def chance(self, now: float) -> float:
        """Return the chance of being used again, which fades with time; 0 if no request of ours wrote it."""
        faded: float = 2.0 ** (-max(0.0, now - self.used) / HALF_LIFE)
        return faded if self.turns else 0.0

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
    return SlotContents(
        tokens=snapshot.tokens,
        checkpoints=possible[-traits.checkpoint_cap :],
        possible=possible if traits.guessed else (),
        # A repaired window is one position longer than a bare one, so that it can be extended.
        slack=1 if snapshot.repaired else 0,
        floor=_bare_floor(len(snapshot.tokens), traits),
        request=request,
        turns=snapshot.turns,
        from_file=keeps_checkpoints(traits) and not carried,
        used=now,
    )


def bare(state: SlotContents, traits: EngineTraits) -> SlotContents:
    """Return the state after a copy to a file or the RAM cache and back: a window loses what precedes it."""
    return replace(state, slack=0, floor=_bare_floor(state.total, traits))


def _bare_floor(total: int, traits: EngineTraits) -> int:
    """Return the floor of a state of so many tokens after such a copy."""
    cut_short = traits.memory is Memory.SWA and traits.swa_full and total > traits.n_swa
    return total - 1 if cut_short else 0


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
