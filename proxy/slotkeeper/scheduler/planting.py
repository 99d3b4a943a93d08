"""What is put in place while a prompt is computed anyway: where other prompts will part from it.

A state that cannot be cut anywhere is cut where a checkpoint is, so one is planted at each boundary that
is worth it: the prompt is prefilled up to there first, and the request goes on from that. No token is
computed twice. A beginning that others will share is saved there as well, so that any slot can have it.

1. Where prompts have parted from this one before, they will again: learned branch points, this prompt's own
   among them. In tools and system text that is nearly certain (a clock, another agent).
2. The end of tools and system text, if nothing of it was known: the next conversation will part there.
   If a part of it was known, it changes from time to time, and only the place where it does counts.
3. Elsewhere in tools and system text, the place is unknown: a sub-agent has other tools, a file of
   instructions is edited. Checkpoints at even distances bound what the first such divergence costs.
4. Users go back to their messages and edit them, now and then.
5. A long message often ends in a question, and the next one is about the same text. That is a guess, so it
   is cut there only while the engine's list has room: else an older checkpoint would go for it.

What a cut is worth is the chance that a prompt parts there, or behind it but before the next cut, times
the tokens that the cut before it would leave to compute. The best one is taken, then the others are looked
at again: so the most redundant are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from slotkeeper.scheduler.catalog import Catalog
from slotkeeper.scheduler.costs import WORTH_A_FILE, HourlyBudget
from slotkeeper.scheduler.effects import Keep, Prefill, Purpose, SaveMoment, Step
from slotkeeper.scheduler.engine_model import (
    TAIL,
    EngineTraits,
    after_prefill,
    checkpoints_last,
    keeps_checkpoints,
    marked,
)
from slotkeeper.scheduler.prompt_tree import Branch
from slotkeeper.scheduler.shadow import ReusePlan
from slotkeeper.scheduler.slot_contents import first_kept
from slotkeeper.scheduler.table import EngineTable
from slotkeeper.scheduler.types import Boundary, BoundaryKind, Tokens

PRICE: Final = 16.0  # tokens: a round trip, and a batch that is cut in two
TAKEN: Final = 3  # of the engine's checkpoints that a plant makes, at most
MOST: Final = 8  # plants in one request
LEAST: Final = 64  # tokens to compute, below which nothing is planted

# How likely the next prompt parts at such a place. Only their order matters much: a branch that was seen
# once is more likely than an edit, one in what all conversations share is nearly certain.
IN_HEAD: Final = 0.7
SEEN_ONCE: Final = 0.3
NEW_HEAD: Final = 0.5
EDIT: Final = 0.02
SOMEWHERE: Final = 0.02  # in a stretch of tools and system text
GUESSED: Final = {BoundaryKind.QUESTION: 0.1, BoundaryKind.LINE: 0.02}  # in a long message at the end

STRETCH: Final = 1024  # tokens, at least
STRETCHES: Final = MOST  # at most, of one head


@dataclass(frozen=True, slots=True)
class Structure:
    """What is known of a prompt's shape."""

    boundaries: tuple[Boundary, ...] = ()
    branches: tuple[Branch, ...] = ()
    known: int = 0  # tokens of it that were computed before
    known_at: float = 0.0  # when they last were, in seconds

    @property
    def head(self) -> int:
        """Tokens before the first message; 0 = not known."""
        return next((b.at for b in self.boundaries if b.kind is BoundaryKind.HEAD), 0)


NO_STRUCTURE: Final = Structure()


@dataclass(frozen=True, slots=True)
class CutPlace:
    """Where prompts may part."""

    at: int  # tokens
    chance: float
    shared: bool  # by several conversations, or likely to be
    guessed: bool = False  # worth no older checkpoint


@dataclass(frozen=True, slots=True)
class Cut:
    """What is made at one place."""

    at: int
    checkpoint: bool
    file: bool


def places(structure: Structure, length: int) -> Iterator[CutPlace]:
    """Where prompts may part from one of this length. Numbers as above."""
    for branch in structure.branches:  # 1
        seen = branch.ways / (branch.ways + 1) if branch.ways > 2 else SEEN_ONCE
        inside = branch.at <= structure.head
        yield CutPlace(branch.at, max(IN_HEAD, seen) if inside else seen, shared=True)
    yield from _in_head(structure.head, structure.known)  # 2, 3
    for boundary in structure.boundaries:  # 4, 5
        if boundary.kind is BoundaryKind.USER and boundary.at < length:
            yield CutPlace(boundary.at, EDIT, shared=False)
        elif boundary.kind in GUESSED:
            yield CutPlace(boundary.at, GUESSED[boundary.kind], shared=False, guessed=True)


def _in_head(head: int, known: int) -> Iterator[CutPlace]:
    """Its end, where nothing of it was known, and even distances in what is new of it."""
    if head and not WORTH_A_FILE <= known < head:
        yield CutPlace(head, NEW_HEAD, shared=True)
    stretch = max(STRETCH, head // STRETCHES)
    for at in range(stretch, head, stretch):
        if at > known:
            yield CutPlace(at, SOMEWHERE, shared=False)


def steps(
    prompt: Tokens,
    structure: Structure,
    *,
    reuse_plan: ReusePlan,
    table: EngineTable,
    catalog: Catalog,
    writes: HourlyBudget,
    user_starts: Sequence[int],
    now: float,
) -> tuple[Step, ...]:
    """What to do in the slot before the request goes there; nothing where nothing is worth it.

    What a file will take is spent from `writes`.
    """
    if len(prompt) - reuse_plan.reuse < LEAST or 0 < table.traits.n_ctx <= len(prompt):
        return ()  # the engine refuses a prompt that is longer than its slot
    found = [p for p in places(structure, len(prompt)) if reuse_plan.reuse < p.at <= len(prompt) - 2 * TAIL]
    if not found:
        return ()
    alone = _alone(reuse_plan, len(prompt), table.traits, user_starts)
    checkpoints = _checkpoints(found, reuse_plan, alone, table.traits)
    thinned_to = _first_start(alone, user_starts, table.traits)
    files = _files(found, prompt, thinned_to, table, catalog) if table.may_save(now) else set()
    files = {at for at in files if writes.spend(table.rates.size_of(at), now)}
    displaced = _displaced(alone, checkpoints, files, reuse_plan, table.traits)
    cuts = _cuts({*checkpoints, *displaced}, files)
    return tuple(step for cut in cuts for step in _made(cut, prompt, table.traits))


def _cuts(checkpoints: Collection[int], files: Collection[int]) -> Iterator[Cut]:
    """In their order. A checkpoint just before a file is made with it: the slot would have to go back."""
    together = {at for at in checkpoints for file in files if 0 < file - at <= TAIL}
    for at in sorted({*checkpoints, *files} - together):
        joined = any(0 < at - other <= TAIL for other in together)
        yield Cut(at, checkpoint=at in checkpoints or (joined and at in files), file=at in files)


def _alone(
    reuse_plan: ReusePlan, length: int, traits: EngineTraits, user_starts: Sequence[int]
) -> tuple[int, ...]:
    """Where the request would leave checkpoints if nothing were planted."""
    base = reuse_plan.base
    left = after_prefill(
        base.checkpoints if base else (),
        reuse=reuse_plan.reuse,
        end=length,
        user_starts=user_starts,
        task=0,
        traits=traits,
        first=first_kept(base, reuse_plan.reuse, traits),
    )
    return tuple(c.at for c in left)


def _displaced(
    alone: Sequence[int],
    checkpoints: Collection[int],
    files: Collection[int],
    reuse_plan: ReusePlan,
    traits: EngineTraits,
) -> set[int]:
    """Checkpoints of the request's own that plants would cost it, for they lie before the last plant's end.

    It would be worse than without us if the next prompt parts behind one. So they are planted as well.
    """
    ends, begin = sorted({*(at + TAIL for at in checkpoints), *files}), reuse_plan.reuse
    if not ends:
        return set()
    left = {*checkpoints, *_left_by_plants(begin, ends, traits)}
    lost = {at for at in _lasting(alone, begin, traits) if begin < at < ends[-1]}
    missed = {at for at in lost if not any(0 <= at - other <= LEAST for other in left)}
    room = traits.checkpoint_cap - len(alone) - 1
    return missed if TAKEN * (len(ends) + len(missed)) <= room else set()


def _left_by_plants(begin: int, ends: Sequence[int], traits: EngineTraits) -> Iterator[int]:
    """Where the engine makes checkpoints when it prefills from `begin` to each of these ends in turn."""
    for end in ends:
        yield from (at for at in (end - TAIL - traits.n_ubatch, end - TAIL) if at > begin)
        begin = end


def _lasting(alone: Sequence[int], begin: int, traits: EngineTraits) -> Sequence[int]:
    """Checkpoints of the request's own that would outlive the next task.

    An engine that thins its list keeps only the first one, and a plant leaves another before it, if it can.
    """
    if checkpoints_last(traits):
        return alone
    return [at for at in alone[:1] if at - traits.n_ubatch <= begin]


def _checkpoints(
    found: Collection[CutPlace], reuse_plan: ReusePlan, alone: Collection[int], traits: EngineTraits
) -> set[int]:
    """Where checkpoints are worth a plant, beside those that the request itself will leave."""
    if not checkpoints_last(traits):
        return set()
    cuts = {0, reuse_plan.reuse, *alone}
    chosen: set[int] = set()
    most = min(MOST, traits.checkpoint_cap // 4)
    room = traits.checkpoint_cap - len(alone) - 1  # the engine thins its list before it is quite full
    while len(chosen) < most:
        full = TAKEN * (len(chosen) + 1) > room
        best = _best([p for p in found if not (full and p.guessed)], cuts)
        if best is None:
            break
        chosen.add(best.at)
        cuts.add(best.at)
    return chosen


def _best(found: Collection[CutPlace], cuts: Collection[int]) -> CutPlace | None:
    """The place that saves most: for every prompt that parts there or behind it, up to the next cut."""

    def worth(place: CutPlace) -> float:
        lower = max(cut for cut in cuts if cut <= place.at)
        upper = min((cut for cut in cuts if cut > place.at), default=inf)
        return (place.at - lower) * sum(p.chance for p in found if place.at <= p.at < upper)

    best = max(found, key=worth, default=None)
    return best if best and worth(best) > PRICE else None


def _first_start(alone: Sequence[int], user_starts: Sequence[int], traits: EngineTraits) -> int:
    """Where an engine that thins would keep its only checkpoint, at the start of a message; 0: nowhere."""
    thins = keeps_checkpoints(traits) and not checkpoints_last(traits)
    return alone[0] if thins and alone and alone[0] in user_starts else 0


def _files(
    found: Collection[CutPlace], prompt: Tokens, thinned_to: int, table: EngineTable, catalog: Catalog
) -> set[int]:
    """The shared beginning that is most worth a file, if no file has it.

    A file that can be cut serves prompts that diverge at a checkpoint before its end, so the longest one
    will do. One without checkpoints is of use only to prompts that diverge behind it.

    An engine that thins would then keep a checkpoint before that as its only one.
    """
    traits = table.traits
    best, most, chance = set[int](), 0.0, 0.0
    for place in sorted(found, key=lambda p: p.at, reverse=True):
        if not place.shared or place.at < WORTH_A_FILE:
            continue
        chance = place.chance + (chance if traits.files_only_extend else 0.0)
        missing = place.at - catalog.covered(prompt.cut(0, place.at), traits)
        price = table.rates.save_price(place.at) + max(0, thinned_to - place.at)
        if (worth := chance * missing - price) > most:
            best, most = {place.at}, worth
            if not traits.files_only_extend:
                break
    return best


def _made(cut: Cut, prompt: Tokens, traits: EngineTraits) -> Iterator[Step]:
    """The steps for one cut. The engine keeps a checkpoint TAIL tokens before a prompt's end."""
    exactly = Prefill(prompt.cut(0, cut.at), Purpose.PLANT)
    beyond = Prefill(prompt.cut(0, cut.at + TAIL), Purpose.PLANT)
    if not cut.file:
        yield beyond
    elif not cut.checkpoint:
        yield from (exactly, Keep(SaveMoment.BOUNDARY))
    elif not traits.files_carry:
        yield from (exactly, Keep(SaveMoment.BOUNDARY), beyond)
    elif traits.speculative:
        yield from (Prefill(marked(exactly.tokens), Purpose.PLANT), Keep(SaveMoment.BOUNDARY))
    else:
        yield from (beyond, Keep(SaveMoment.BOUNDARY))


def kept(plan_steps: Sequence[Step], left: int) -> Tokens | None:
    """What the last `left` of these steps will save at a boundary, None if nothing."""
    for index in range(len(plan_steps) - left, len(plan_steps)):
        step, before = plan_steps[index], plan_steps[index - 1]
        if index and isinstance(step, Keep) and step.moment is SaveMoment.BOUNDARY:
            return before.tokens if isinstance(before, Prefill) else None
    return None
