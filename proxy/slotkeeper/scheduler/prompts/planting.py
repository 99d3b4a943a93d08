"""Plants (checkpoints and files made while a prompt is computed anyway): at which places, for which price.

A state that cannot be cut anywhere can be cut at a checkpoint. So we plant one at each boundary that is worth
it: we prefill the prompt up to there first, and the request continues from that state. No token is computed
twice. A beginning that other prompts will share is also saved to a file, so that any slot can load it.

1. Prompts diverge again where they diverged before: at learned branch points, this prompt's own included. In
   tools and system text that is nearly certain (a clock, another agent).
2. If nothing or all of the tools and system text was known, the next conversation diverges at their end. If
   only a part was known, they change from time to time, and only the place of the change counts.
3. Elsewhere in tools and system text, the place is unknown: a sub-agent has other tools, a file of
   instructions is edited. Checkpoints at even distances bound the cost of the first such divergence.
4. Users sometimes go back to their messages and edit them.
5. A long message often ends in a question, and the next one is about the same text. That is a guess, so we
   cut there only while the engine's list has room: otherwise an older checkpoint would be dropped for it.
6. Several questions are asked about one image, and the engine leaves no checkpoint behind one by itself: each
   question would compute the image again. So we cut behind the last image, if a question follows it there.

A cut is worth the chance that a prompt diverges there, or behind it but before the next cut, times the tokens
that the previous cut would leave to compute. We take the best cut, then evaluate the others again: so the
most redundant ones are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from slotkeeper.scheduler.effects import Prefill, Purpose, Save, SaveMoment, Step
from slotkeeper.scheduler.prompts.tokens import BoundaryKind, Chunk, Tokens, outside
from slotkeeper.scheduler.rates import WORTH_A_FILE
from slotkeeper.scheduler.requests.pending import Structure
from slotkeeper.scheduler.slots.engine_model import (
    TAIL,
    EngineTraits,
    after_prefill,
    checkpoints_last,
    first_kept,
    keeps_checkpoints,
    marked,
    reuse,
    thins_at_each_task,
)
from slotkeeper.scheduler.slots.shadow import ReusePlan
from slotkeeper.scheduler.slots.table import EngineTable
from slotkeeper.scheduler.snapshots.budgets import HourlyBudget
from slotkeeper.scheduler.snapshots.catalog import Catalog
from slotkeeper.scheduler.types import SlotId

PLANT_PRICE_TOKENS: Final = 16.0  # tokens: a round trip, and a batch that is cut in two
# The same for each image before a plant's end, which the engine reads once more though it does not encode it
# again: 3 ms for 64 x 64 pixels, 80 ms for 4000 x 3000.
IMAGE_PRICE_TOKENS: Final = 16.0
CHECKPOINTS_PER_PLANT: Final = 3  # checkpoints of the engine's list that one plant uses, at most
CHECKPOINTS_NEAR_AN_END: Final = 2  # checkpoints that the engine makes near the end of a prompt
MAX_PLANTS: Final = 8  # plants in one request
MIN_COMPUTED_TOKENS: Final = 64  # tokens to compute, below which nothing is planted

# The chance that the next prompt diverges at such a place. Mostly their order matters: a branch that was seen
# once is more likely than an edit, and a branch in the shared head is nearly certain.
CHANCE_IN_HEAD: Final = 0.7
CHANCE_SEEN_ONCE: Final = 0.3
CHANCE_AT_NEW_HEAD: Final = 0.5
CHANCE_OF_EDIT: Final = 0.02
CHANCE_IN_STRETCH: Final = 0.02  # in a stretch of tools and system text
CHANCE_GUESSED: Final = {BoundaryKind.QUESTION: 0.1, BoundaryKind.LINE: 0.02}  # in a long message at the end

# The chance that another prompt begins with a new head before the conversation pauses and its slot is saved.
# Where many work, it is larger, but there others wait for this client as well: only a short wait is risked.
CHANCE_SHARED_SOON: Final = 0.1
CHANCE_SHARED_SOON_AT_A_SHORT_WAIT: Final = 0.2
SHORT_WAIT_SECONDS: Final = 1.0

CHANCE_ABOUT_IMAGE: Final = 0.3  # another question about the last image

STRETCH_TOKENS: Final = 1024  # tokens, at least
MAX_STRETCHES: Final = MAX_PLANTS  # in one head, at most


@dataclass(frozen=True, slots=True)
class CutPlace:
    """A place where prompts may diverge."""

    at: int  # tokens
    chance: float
    shared: bool  # several conversations share the tokens before it, or probably will
    guessed: bool = False  # not worth the loss of an older checkpoint
    images: int = 0  # in the tokens before it

    @property
    def price(self) -> float:
        """Tokens of prefill that a plant up to there costs."""
        return PLANT_PRICE_TOKENS + IMAGE_PRICE_TOKENS * self.images


@dataclass(frozen=True, slots=True)
class Cut:
    """A checkpoint, a file, or both, to make at one place."""

    at: int
    checkpoint: bool
    file: bool


def places(structure: Structure, prompt: Tokens, *, in_slot: bool = True) -> Iterator[CutPlace]:
    """Yield the places where other prompts may diverge from this one. The numbers are as above.

    `in_slot`: a slot of this engine can be cut there.
    """
    for branch in structure.branches:  # 1
        seen = branch.ways / (branch.ways + 1) if branch.ways > 2 else CHANCE_SEEN_ONCE
        chance = max(CHANCE_IN_HEAD, seen) if branch.at <= structure.head else seen
        # One other way from the middle of a conversation is an edit, which follows in the same slot.
        several = branch.ways > 2 or branch.at <= structure.first_turn or not in_slot
        yield CutPlace(branch.at, chance, shared=several and branch.at <= structure.shared_until)
    yield from _in_head(structure.head, structure.known)  # 2, 3
    for boundary in structure.boundaries:  # 4, 5
        if boundary.kind is BoundaryKind.USER and boundary.at < len(prompt):
            yield CutPlace(boundary.at, CHANCE_OF_EDIT, shared=False)
        elif boundary.kind in CHANCE_GUESSED:
            yield CutPlace(boundary.at, CHANCE_GUESSED[boundary.kind], shared=False, guessed=True)
    if prompt.chunks:  # 6
        end = prompt.chunks[-1].end
        closing = min((b.at for b in structure.boundaries if b.at >= end), default=len(prompt))
        if closing - end > 2 * TAIL:  # else no other question about it can stand there
            yield CutPlace(end, CHANCE_ABOUT_IMAGE, shared=False)


def _in_head(head: int, known: int) -> Iterator[CutPlace]:
    """Yield the end of the head unless only a part of it was known, and even distances in its new part."""
    if head and not WORTH_A_FILE <= known < head:
        yield CutPlace(head, CHANCE_AT_NEW_HEAD, shared=True)
    stretch = max(STRETCH_TOKENS, head // MAX_STRETCHES)
    for at in range(stretch, head, stretch):
        if at > known:
            yield CutPlace(at, CHANCE_IN_STRETCH, shared=False)


def steps(
    prompt: Tokens,
    structure: Structure,
    *,
    reuse_plan: ReusePlan,
    table: EngineTable,
    catalog: Catalog,
    writes: HourlyBudget,
    user_starts: Sequence[int],
    waiting: int,
    now: float,
) -> tuple[Step, ...]:
    """Return the plants to make in the slot before the request goes there; () if none is worth it.

    The bytes of each planned file are spent from `writes`.
    """
    if len(prompt) - reuse_plan.reuse < MIN_COMPUTED_TOKENS or 0 < table.traits.n_ctx <= len(prompt):
        return ()  # the engine refuses a prompt that is longer than its slot
    in_slot = table.traits.cuttable or keeps_checkpoints(table.traits)
    possible = places(structure, prompt, in_slot=in_slot)
    found = [p for p in possible if reuse_plan.reuse < p.at <= len(prompt) - 2 * TAIL]
    if prompt.chunks:
        found = [*_among_images(found, prompt.chunks)]
    if not found:
        return ()
    alone = _alone(reuse_plan, prompt, table.traits, user_starts)
    # Where an engine that thins keeps its only checkpoint, if a user message begins there.
    thins = thins_at_each_task(table.traits)
    thinned_to = alone[0] if thins and alone and alone[0] in user_starts else 0
    files = set[int]()
    if table.may_save(now):
        files = _files(found, prompt, table, catalog, reuse_plan=reuse_plan, thinned_to=thinned_to)
        files |= _image_file(found, prompt, table, catalog, reuse_plan=reuse_plan, others=files)
        files = {at for at in files if not _held_elsewhere(prompt.cut(0, at), reuse_plan.slot, table)}
    files = {at for at in files if writes.spend(_file_bytes(at, reuse_plan, table), now)}
    checkpoints = _checkpoints(found, reuse_plan, alone, table.traits)
    at_once = (
        saved_at_once(
            prompt.cut(0, at),
            structure,
            reuse_plan.slot,
            checkpoints=CHECKPOINTS_PER_PLANT * len(checkpoints),
            waiting=waiting,
            table=table,
            catalog=catalog,
        )
        for at in files
    )
    if table.traits.snapshots and not reuse_plan.reuse and not any(at_once):
        found = [*_worth_being_first(found, alone, table.traits)]
        checkpoints = _checkpoints(found, reuse_plan, alone, table.traits)
    displaced = _displaced(alone, checkpoints, files, reuse_plan, table.traits)
    cuts = _cuts({*checkpoints, *displaced}, files)
    return tuple(step for cut in cuts for step in _made(cut, prompt, table.traits))


def _among_images(found: Sequence[CutPlace], images: Sequence[Chunk]) -> Iterator[CutPlace]:
    """Yield the places that are not inside an image, each with the number of images before it."""
    for place in found:
        if outside(images, place.at) == place.at:
            yield replace(place, images=sum(1 for image in images if image.start < place.at))


def _cuts(checkpoints: Collection[int], files: Collection[int]) -> Iterator[Cut]:
    """Yield the cuts in order.

    A checkpoint at most TAIL tokens before a file's end is made together with the file: separately, the slot
    would have to go back.
    """
    together = {at for at in checkpoints for file in files if 0 < file - at <= TAIL}
    for at in sorted({*checkpoints, *files} - together):
        joined = any(0 < at - other <= TAIL for other in together)
        yield Cut(at, checkpoint=at in checkpoints or (joined and at in files), file=at in files)


def _alone(
    reuse_plan: ReusePlan, prompt: Tokens, traits: EngineTraits, user_starts: Sequence[int]
) -> tuple[int, ...]:
    """Return where the request would leave checkpoints if nothing were planted."""
    base = reuse_plan.base
    left = after_prefill(
        base.checkpoints if base else (),
        reuse=reuse_plan.reuse,
        end=len(prompt),
        user_starts=user_starts,
        task=0,
        traits=traits,
        first=first_kept(base, reuse_plan.reuse, traits),
        images=prompt.chunks,
    )
    return tuple(c.at for c in left)


def _worth_being_first(
    found: Sequence[CutPlace], alone: Sequence[int], traits: EngineTraits
) -> Iterator[CutPlace]:
    """Yield the places without those whose checkpoint would cost an empty slot more than it is worth.

    A full list loses the checkpoints that are close to each other, but never its first one (T7). So in the
    long run a prompt that begins with the same head goes back to that one, wherever the engine has made it,
    unless a file has been made of the head. Without files, a head that changes soon costs more than that.
    """
    if not (keeps_checkpoints(traits) and traits.checkpoint_min_step):
        yield from found
        return
    left_by = {place: place.at - traits.n_ubatch for place in found}  # the first checkpoint of a plant there
    first = min((*alone[:1], max((left_by[place] for place in found if place.shared), default=0)))
    diverge_behind = sum(place.chance for place in found if place.shared and place.at >= first)
    for place, left in left_by.items():
        if left >= first or place.chance * place.at > diverge_behind * (first - left):
            yield place


def _displaced(
    alone: Sequence[int],
    checkpoints: Collection[int],
    files: Collection[int],
    reuse_plan: ReusePlan,
    traits: EngineTraits,
) -> set[int]:
    """Return the request's own checkpoints that it would not make because a plant ends behind them.

    If the next prompt diverged behind one of them, it would be worse off than without us. So they are planted
    as well.
    """
    ends, begin = sorted({*(at + TAIL for at in checkpoints), *files}), reuse_plan.reuse
    if not ends:
        return set()
    left = {*checkpoints, *_left_by_plants(begin, ends, traits)}
    lost = {at for at in _lasting(alone, begin, traits) if begin < at < ends[-1]}
    missed = {at for at in lost if not any(0 <= at - other <= MIN_COMPUTED_TOKENS for other in left)}
    room = traits.checkpoint_cap - len(alone) - 1
    return missed if CHECKPOINTS_PER_PLANT * (len(ends) + len(missed)) <= room else set()


def _left_by_plants(begin: int, ends: Sequence[int], traits: EngineTraits) -> Iterator[int]:
    """Yield where the engine makes checkpoints when it prefills from `begin` to each end in turn."""
    for end in ends:
        yield from (at for at in (end - TAIL - traits.n_ubatch, end - TAIL) if at > begin)
        begin = end


def _lasting(alone: Sequence[int], begin: int, traits: EngineTraits) -> Sequence[int]:
    """Return the request's own checkpoints that would survive the next task.

    An engine that thins its list keeps only the first one. A plant leaves another before that, if it can.
    """
    if checkpoints_last(traits):
        return alone
    return [at for at in alone[:1] if at - traits.n_ubatch <= begin]


def _checkpoints(
    found: Collection[CutPlace], reuse_plan: ReusePlan, alone: Collection[int], traits: EngineTraits
) -> set[int]:
    """Return where checkpoints are worth a plant, beside those that the request itself will leave."""
    if not checkpoints_last(traits):
        return set()
    cuts = {0, reuse_plan.reuse, *alone}
    chosen: set[int] = set()
    most = min(MAX_PLANTS, traits.checkpoint_cap // 4)
    room = traits.checkpoint_cap - len(alone) - 1  # the engine thins its list before it is quite full
    while len(chosen) < most:
        full = CHECKPOINTS_PER_PLANT * (len(chosen) + 1) > room
        best = _best([p for p in found if not (full and p.guessed)], cuts)
        if best is None:
            break
        chosen.add(best.at)
        cuts.add(best.at)
    return chosen


def _best(found: Collection[CutPlace], cuts: Collection[int]) -> CutPlace | None:
    """Return the place that saves most, over all prompts that diverge between it and the next cut."""

    def worth(place: CutPlace) -> float:
        lower = max(cut for cut in cuts if cut <= place.at)
        upper = min((cut for cut in cuts if cut > place.at), default=inf)
        return (place.at - lower) * sum(p.chance for p in found if place.at <= p.at < upper)

    best = max(found, key=worth, default=None)
    return best if best and worth(best) > best.price else None


def _files(
    found: Collection[CutPlace],
    prompt: Tokens,
    table: EngineTable,
    catalog: Catalog,
    *,
    reuse_plan: ReusePlan,
    thinned_to: int,
) -> set[int]:
    """Return the end of the shared beginning that is most worth a file, if no file has it yet.

    A file that can be cut also serves prompts that diverge at a checkpoint before its end, so the longest
    beginning is best. A file without checkpoints serves only prompts that diverge behind its end.

    With a file, an engine that thins keeps its only checkpoint before the file's end instead of at
    `thinned_to`; the tokens between count as part of the price.
    """
    traits = table.traits
    best, most, chance = set[int](), 0.0, 0.0
    for place in sorted(found, key=lambda p: p.at, reverse=True):
        if not place.shared or place.at < WORTH_A_FILE:
            continue
        chance = place.chance + (chance if traits.files_only_extend else 0.0)
        missing = place.at - catalog.covered(prompt.cut(0, place.at), traits)
        saving = table.rates.save_price(_file_bytes(place.at, reuse_plan, table))
        price = saving + max(0, thinned_to - place.at)
        if (worth := chance * missing - price) > most:
            best, most = {place.at}, worth
            if not traits.files_only_extend:
                break
    return best


def _held_elsewhere(head: Tokens, slot: SlotId, table: EngineTable) -> bool:
    """Whether another slot or the RAM cache has a state that can be cut near the end of this beginning.

    Other prompts go on from that one until its conversation pauses, and then it is saved while nobody waits.
    """
    shadow = table.shadow
    others = (*shadow.slots[:slot], *shadow.slots[slot + 1 :], *shadow.ram)
    return any(reuse(contents, head, table.traits) >= len(head) - TAIL for contents in others)


def _image_file(
    found: Collection[CutPlace],
    prompt: Tokens,
    table: EngineTable,
    catalog: Catalog,
    *,
    reuse_plan: ReusePlan,
    others: Collection[int],
) -> set[int]:
    """Return the end of the last image if it is worth a file, beside the one that is made at `others`.

    A file without checkpoints that ends in a question serves no other question. So after a restart the image
    would be computed again.
    """
    end = prompt.chunks[-1].end if prompt.chunks else 0
    if not table.traits.files_only_extend or end < WORTH_A_FILE or not prompt.may_end(end):
        return set()
    chance = max((place.chance for place in found if place.at == end), default=0.0)
    missing = end - max(catalog.covered(prompt.cut(0, end), table.traits), *others, 0)
    price = table.rates.save_price(_file_bytes(end, reuse_plan, table))
    return {end} if chance * missing > price else set()


def _file_bytes(at: int, reuse_plan: ReusePlan, table: EngineTable) -> int:
    """Return the estimated bytes of a file that ends at `at`, with the checkpoints before it."""
    before = reuse_plan.base.checkpoints if reuse_plan.base else ()
    kept = sum(1 for checkpoint in before if checkpoint.at <= min(at, reuse_plan.reuse))
    return table.file_bytes(at, kept + CHECKPOINTS_NEAR_AN_END if keeps_checkpoints(table.traits) else 0)


def _made(cut: Cut, prompt: Tokens, traits: EngineTraits) -> Iterator[Step]:
    """Yield the steps for one cut. The engine keeps a checkpoint TAIL tokens before a prompt's end.

    Where an image follows, foreign tokens stand for these. Right behind an image that is not known to be
    closed no prompt of ours ends.
    """
    exactly = Prefill(prompt.cut(0, cut.at), Purpose.PLANT)
    end = cut.at + TAIL
    beyond = Prefill(prompt.cut(0, end) if prompt.may_end(end) else marked(exactly.tokens), Purpose.PLANT)
    if not cut.file:
        yield beyond
    elif not prompt.may_end(cut.at) and not traits.speculative:
        yield from (beyond,) if traits.files_only_extend else (beyond, Save(SaveMoment.BOUNDARY))
    elif not cut.checkpoint:
        yield from (exactly, Save(SaveMoment.BOUNDARY))
    elif not traits.files_carry:
        yield from (exactly, Save(SaveMoment.BOUNDARY), beyond)
    elif traits.speculative:
        yield from (Prefill(marked(exactly.tokens), Purpose.PLANT), Save(SaveMoment.BOUNDARY))
    else:
        yield from (beyond, Save(SaveMoment.BOUNDARY))


def saved_at_once(
    head: Tokens,
    structure: Structure,
    slot: SlotId,
    *,
    checkpoints: int,
    waiting: int,
    awaited: int = 0,
    table: EngineTable,
    catalog: Catalog,
) -> bool:
    """Whether a file of a new head is worth the wait of all.

    Other prompts have begun with it before, `awaited` of the queue do, or others probably will soon.
    Otherwise the slot will be saved when its conversation pauses, and that file can be cut at the head's end
    too, unless files contain no checkpoints. So now it only serves prompts that come before, and to write it
    stops every slot at work, and keeps all `waiting` requests in the queue.
    """
    traits, end = table.traits, len(head)
    if any(0 <= end - branch.at <= TAIL for branch in structure.branches):
        return True
    if not traits.cuttable and not traits.files_carry:
        return True
    stopped = len(table.states) - len(table.idle) + (slot in table.idle) + waiting
    stops = table.rates.writing.seconds(table.file_bytes(end, checkpoints)) * stopped
    chance = CHANCE_SHARED_SOON if stops > SHORT_WAIT_SECONDS else CHANCE_SHARED_SOON_AT_A_SHORT_WAIT
    return (awaited or chance) * (end - catalog.covered(head, traits)) > stops * table.rates.prefill.mean


def kept(plan_steps: Sequence[Step], left: int) -> Tokens | None:
    """Return the tokens that the last `left` steps will save at a boundary; None if they save nothing."""
    for index in range(len(plan_steps) - left, len(plan_steps)):
        step, before = plan_steps[index], plan_steps[index - 1]
        if index and isinstance(step, Save) and step.moment is SaveMoment.BOUNDARY:
            return before.tokens if isinstance(before, Prefill) else None
    return None
