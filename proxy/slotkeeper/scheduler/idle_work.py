"""What is to be done in idle time for a slot: one step at a time, decided again after each.

Newer builds write checkpoints into slot files: one file at the end can be cut wherever the slot could.
Older builds do not (engine.md 2.6): there the end, the last prompt's end and every user message get a
file each. The slot is cut back from one to the next, which costs a few tokens, and is then restored to its
end. That must not be interrupted, so it is done in a longer rest. Only where no file has what stands before
the first user message, which others will begin with too, is it done at once.

A cut takes the checkpoints behind it, and a file brings none back. What lies in files already can be spared,
but a question about a long document parts at its end, where no file is. So the restore step is computed where
that costs less than the checkpoints are worth, and no cut is made that would give up more than it saves.

With a draft model a file's own end restores without draft state; a checkpoint restores with it. So four
foreign tokens are put behind the end first: that makes a checkpoint there, and the next prompt parts
from them and goes back to it (engine.md 2.6).

Older builds keep no draft state in files: a restored slot continues at once, but its drafts are bad until
some thousand tokens were computed there (engine.md 2.6). So the latest conversations are restored from
an earlier file, and the tail is computed before any request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from slotkeeper.scheduler.catalog import NEVER, Catalog
from slotkeeper.scheduler.costs import WORTH_A_FILE
from slotkeeper.scheduler.effects import Keep, Load, Prefill, Purpose, SaveMoment, Step, Wipe
from slotkeeper.scheduler.engine_model import EngineTraits, foreign_token, is_marked, marked
from slotkeeper.scheduler.kv_pool import wipes
from slotkeeper.scheduler.prices import blind_price, parked_price, restore_price
from slotkeeper.scheduler.slot_contents import SlotContents, Snapshot, Tier, goes_on_from, reuse
from slotkeeper.scheduler.state import State, user_starts
from slotkeeper.scheduler.steps import Chore
from slotkeeper.scheduler.table import EngineTable
from slotkeeper.scheduler.types import Tokens

NEW: Final = 32  # tokens that are in no file yet, below which it is not saved again
BOUNDARIES: Final = 8  # at most, of one slot
COMPUTED: Final = 2048  # tokens at most for one of them, and with a draft model for the restore step
ASKED: Final = 0.1  # how likely a prompt parts where the last user message begins, in it, or behind it
EARLIER: Final = 0.02  # the same before that


def unsaved(contents: SlotContents, traits: EngineTraits, catalog: Catalog) -> bool:
    """Whether enough of its end is in no file."""
    return contents.total - catalog.covers(contents, traits) >= NEW


def prefetch_plan(
    contents: SlotContents, table: EngineTable, catalog: Catalog
) -> tuple[Load | None, Prefill, int] | None:
    """To what the next turn will begin with, and the tokens that it costs; None if the slot is there.

    From a file, where that leaves less to compute than the slot does.
    """
    following = contents.following
    if following is None or contents.rough or contents.adapted or following == contents.tokens:
        return None
    here = reuse(contents, following, table.traits)
    found = catalog.best(following, table.traits, lambda s: here + restore_price(table, s))
    goal = Prefill(following, Purpose.NEXT)
    if found:
        return Load(found[0]), goal, len(following) - found[1]
    return None, goal, len(following) - here


def way_back(contents: SlotContents, table: EngineTable, catalog: Catalog) -> Prefill | None:
    """To where its next turn will go on, if that is not its end and no file has it.

    Not while it may yet be learned how that begins.
    """
    end = goes_on_from(contents, table.traits)
    unfit = contents.rough or contents.adapted or not contents.foreseen
    if unfit or not table.traits.snapshots or not WORTH_A_FILE <= end < contents.total:
        return None
    back = contents.tokens.cut(0, end)
    return Prefill(back, Purpose.CUT) if end - catalog.covered(back, table.traits) >= NEW else None


def parking_step(
    contents: SlotContents, table: EngineTable, catalog: Catalog, now: float, *, most_bytes: int
) -> Step | None:
    """What saves a state that is about to go; None: it is in files, has no room, or is not worth it."""
    if not table.may_save(now) or table.rates.size_of(contents.total) > most_bytes:
        return None
    if parked_price(table, contents, now) >= blind_price(table, contents, catalog, now):
        return None
    if back := way_back(contents, table, catalog):
        return back
    if not unsaved(contents, table.traits, catalog):
        return None
    return first_step(contents, table, catalog, rested=False)


def emptying_step(table: EngineTable, prompt: Tokens, now: float) -> Step:
    """What makes a slot give up its cells, for this prompt in another one."""
    if table.may_wipe(now) and not wipes(table.traits):
        return Wipe()
    return Prefill(foreign_token(prompt or Tokens([0])), Purpose.EMPTY)


def kept_elsewhere(contents: SlotContents, table: EngineTable, catalog: Catalog, step: Step) -> bool:
    """Whether a file has most of what such a step takes from a slot, or the RAM cache will."""
    in_files = table.traits.snapshots and not unsaved(contents, table.traits, catalog)
    return in_files or (isinstance(step, Prefill) and table.traits.ram_cache)


def done(contents: SlotContents, table: EngineTable, catalog: Catalog) -> bool:
    """Whether nothing is to be computed ahead, nor to be saved of it."""
    return not prefetch_plan(contents, table, catalog) and not first_step(
        contents, table, catalog, rested=True
    )


def first_step(contents: SlotContents, table: EngineTable, catalog: Catalog, *, rested: bool) -> Step | None:
    """None where enough of it is in files already, or where it is not worth one."""
    if not table.traits.snapshots or contents.total < WORTH_A_FILE or contents.rough or contents.adapted:
        return None
    if unsaved(contents, table.traits, catalog):
        return _mark(contents, table.traits) or Keep(SaveMoment.PAUSE)
    return _next_cut(contents, contents, table, catalog, rested=rested)


def next_step(chore: Chore, catalog: Catalog, *, rested: bool) -> Step | None:
    """After a step that went well; None when all is saved and the slot is at its end again."""
    contents, home = chore.contents, chore.home
    if contents is None or home is None:
        return None
    if contents.total == home.total and home.opaque:  # the file has told the ids that we did not know
        home = chore.home = contents
    if isinstance(chore.step, Prefill) and chore.step.purpose is not Purpose.HOME:
        return Keep(SaveMoment.PAUSE)
    if chore.leaves:
        return None
    saved = isinstance(chore.step, Keep)
    if saved and (step := _next_file(contents, home, chore.table, catalog, rested=rested)):
        return step
    return restore_step(chore, catalog)


def _next_file(
    contents: SlotContents, home: SlotContents, table: EngineTable, catalog: Catalog, *, rested: bool
) -> Step | None:
    """After a save: to where another file is to be made; None where there are enough."""
    mark = _mark(contents, table.traits) if contents is home else None
    return mark or _next_cut(contents, home, table, catalog, rested=rested)


def restore_step(chore: Chore, catalog: Catalog) -> Step | None:
    """Back to where the slot was; None where it is there, nothing leads there, or the slot is lost anyway."""
    contents, home = chore.contents, chore.home
    if contents is None or home is None or contents.total >= home.total:
        return None
    if chore.leaves or chore.table.leaving:
        return None
    return _way_home(contents, home, chore.table, catalog)


def _next_cut(
    contents: SlotContents, home: SlotContents, table: EngineTable, catalog: Catalog, *, rested: bool
) -> Step | None:
    """Back to the next boundary of which there is no file, but never where nothing leads home from."""
    traits = table.traits
    cuts = [cut for cut in _unsaved_cuts(home, traits, catalog) if _near(cut, contents, home, traits)]
    if not cuts or not _way_home(contents, home, table, catalog):
        return None
    if not (rested or contents.total < home.total or _opens(cuts[-1], home, traits, catalog)):
        return None
    for cut in cuts:
        if _worth_it(cut, contents, home, table, catalog, cuts=cuts):
            return Prefill(home.tokens.cut(0, cut), Purpose.CUT)
    return None


def _opens(cut: int, home: SlotContents, traits: EngineTraits, catalog: Catalog) -> bool:
    """Whether a user message begins there, and no file has anything of what stands before it."""
    first = home.tokens.cut(0, cut)
    return cut - 1 in user_starts(home.tokens, traits) and not catalog.covered(first, traits)


def _worth_it(
    cut: int,
    contents: SlotContents,
    home: SlotContents,
    table: EngineTable,
    catalog: Catalog,
    *,
    cuts: Sequence[int],
) -> bool:
    """Whether a file there saves no less than the restore step costs, and than lost checkpoints would."""
    traits = table.traits
    left = tuple(c for c in contents.checkpoints if c.at < cut)
    there = replace(contents, tokens=home.tokens.cut(0, cut), opaque=0, checkpoints=left)
    stays = isinstance(_way_home(there, home, table, catalog), Prefill)
    if stays and home.total - cut > cut - catalog.covered(there.tokens, traits):
        return False
    end = home.total - (NEW if home.sure else 0)  # where the next turn is known, it parts nowhere near
    lost = [c.at for c in contents.checkpoints if c.at < end and not (stays and c in left)]
    return _worth(lost, home, traits, catalog, cuts) <= _worth([cut - 1], home, traits, catalog)


def _worth(
    checkpoints: Sequence[int],
    home: SlotContents,
    traits: EngineTraits,
    catalog: Catalog,
    cuts: Sequence[int] = (),
) -> float:
    """Tokens that the best of these checkpoints will save, where no file does, nor one made at `cuts`."""
    asked = max(user_starts(home.tokens, traits), default=0)
    most = 0.0
    for at in sorted(checkpoints, reverse=True):
        chance = ASKED if at >= asked else EARLIER
        filed = max((cut for cut in cuts if cut <= at + 1), default=0)  # one more than its checkpoint
        if chance * (at - filed) > most:
            filed = max(filed, catalog.covered(home.tokens.cut(0, at + 1), traits))
            most = max(most, chance * (at - filed))
    return most


def _near(cut: int, contents: SlotContents, home: SlotContents, traits: EngineTraits) -> bool:
    """Whether the slot can be cut there, and restored to its end, for few tokens."""
    if cut >= contents.total or cut - reuse(contents, home.tokens.cut(0, cut), traits) > COMPUTED:
        return False
    return not traits.speculative or home.total - cut <= COMPUTED


def _mark(contents: SlotContents, traits: EngineTraits) -> Step | None:
    """Foreign tokens behind the end, so that a file made then carries the draft state there."""
    if not traits.files_carry_drafts or contents.opaque:
        return None
    if any(c.at == contents.total for c in contents.checkpoints) or len(contents.tokens) < WORTH_A_FILE:
        return None
    return None if is_marked(contents.tokens) else Prefill(marked(contents.tokens), Purpose.DRAFT)


def _unsaved_cuts(contents: SlotContents, traits: EngineTraits, catalog: Catalog) -> Iterator[int]:
    """Where the slot can be cut and no file is, longest first: tokens, one more than its checkpoint.

    Also where the last user message begins, if its checkpoint has gone: engines that thin theirs out
    lose it to what was computed ahead, and it is where an edit will part.
    """
    if not traits.files_only_extend:
        return
    starts = user_starts(contents.tokens, traits)
    kept = {c.at for c in contents.checkpoints}
    # Where the next turn is known to extend all of it, no prompt needs the end of the last one.
    last = 0 if contents.sure else max(kept, default=0)
    end = len(contents.tokens) - (NEW if contents.sure else 0)
    asked = max((at for at in starts if at < end), default=0)
    places = sorted({*kept.intersection({*starts, last}), asked}, reverse=True)
    for at in [at for at in places if contents.tokens.may_end(at + 1)][:BOUNDARIES]:
        if WORTH_A_FILE <= at < end and at - catalog.covered(contents.tokens.cut(0, at + 1), traits) >= NEW:
            yield at + 1


def _way_home(
    contents: SlotContents, home: SlotContents, table: EngineTable, catalog: Catalog
) -> Step | None:
    """From its own file; with a draft model by computing it, since a file would leave the drafts bad.

    It is computed, too, where that costs less than a file and the checkpoints that are lost with one. The
    file may end a few tokens before: they were computed ahead since.
    """
    if home.opaque:
        return None
    if table.traits.speculative:
        return Prefill(home.tokens, Purpose.HOME)
    best = catalog.best(home.tokens + NEVER, table.traits, lambda s: float(s.tier is Tier.COLD))
    if best is None or home.total - best[1] >= NEW:
        return None
    if best[1] <= contents.total < home.total:
        return Prefill(home.tokens, Purpose.HOME)
    if 0 < (computes := home.total - contents.total) <= COMPUTED:
        lost = _worth([c.at for c in contents.checkpoints], home, table.traits, catalog)
        if computes <= restore_price(table, best[0]) + lost:
            return Prefill(home.tokens, Purpose.HOME)
    return Load(best[0])


# -- slots of an engine that has just started are warmed -------------------------------------------------

# Tokens. So many bring two thirds of the lost drafts back, the rest costs the whole prompt (engine.md 2.6).
TAIL: Final = 2000
RECENT: Final = 3600.0  # seconds: who was away for longer will hardly come back just now


def coldest(table: EngineTable, catalog: Catalog, now: float) -> Snapshot | None:
    """The end of the latest conversation that no slot holds; of those that one holds none is asked again."""
    fresh = [snapshot for snapshot in catalog if _fit_to_warm(snapshot, table, now)]
    contents = [h.tokens for h in table.shadow.slots if h]
    if len(table.warmed) > len(catalog):  # files that are gone
        table.warmed.intersection_update([s.id for s in catalog])
    for snapshot in sorted(fresh, key=lambda s: (s.used, len(s.tokens)), reverse=True):
        if not any(tokens.lcp(snapshot.tokens) * 2 > len(snapshot.tokens) for tokens in contents):
            return _whole(snapshot, fresh)
        table.warmed.add(snapshot.id)
    return None


def _fit_to_warm(snapshot: Snapshot, table: EngineTable, now: float) -> bool:
    """Whether an empty slot may be warmed with this file: it fits, is recent, and was not looked at yet."""
    fits = snapshot.fingerprint == table.traits.fingerprint
    return fits and now - snapshot.used < RECENT and snapshot.id not in table.warmed


def _whole(latest: Snapshot, fresh: Sequence[Snapshot]) -> Snapshot:
    """The end of its conversation: cuts are saved a moment after that, and are prefixes of it."""
    same = (s for s in fresh if s.tokens.lcp(latest.tokens) == len(latest.tokens))
    return max(same, key=lambda s: len(s.tokens))


def warming_step(end: Snapshot, catalog: Catalog, table: EngineTable) -> Step | None:
    """From the longest file that leaves a tail; a short conversation is computed whole. None: too long."""
    for tail in (TAIL, TAIL // 2):
        early = end.tokens.cut(0, max(0, len(end.tokens) - tail + 1))
        found = catalog.best(early, table.traits, lambda _: 0.0)
        if found and len(found[0].tokens) == found[1]:
            return Load(found[0])
        if len(end.tokens) <= 2 * tail:
            return Prefill(end.tokens, Purpose.DRAFT)
    return None


# -- when -------------------------------------------------------------------------------------------------

SHARE: Final = 20.0  # a pause lasts so many times as long as the save will, because that stalls every slot
CROWD_SHARE: Final = 2.0  # the same where another conversation will have the slot soon: it is saved anyway
LONGEST: Final = 60.0  # seconds: then it is saved even if others are at work
CUTS: Final = 8.0  # times as long a pause, before a slot is cut back so that its boundaries can be saved


def pause(state: State, table: EngineTable, contents: SlotContents, now: float) -> float:
    """How long it has to pause before it is saved.

    In a crowd a pause may not come before the slot is overwritten, so a quick save is not put off. A slow one
    would hold up all slots for what may be parked anyway.
    """
    seconds = table.rates.save_seconds(contents.total)
    hurried = CROWD_SHARE * seconds
    if table.crowded(now) and hurried <= state.limits.pause:
        return hurried
    return min(LONGEST, max(state.limits.pause, SHARE * seconds))


def patience(state: State, table: EngineTable, contents: SlotContents, now: float) -> float:
    """How long it has to pause before the next turn is computed ahead."""
    return min(state.limits.pause, pause(state, table, contents, now))


def rest_until(state: State, table: EngineTable, contents: SlotContents) -> float:
    """When a slot that is saved may be cut: that takes its checkpoints, so it must not be interrupted.

    Not in a crowd: the restore step could take long, and another conversation would have the slot by then.
    """
    usual = max(state.limits.pause, SHARE * table.rates.save_seconds(contents.total))
    rested = contents.used + min(LONGEST, CUTS * usual)
    return max(rested, table.rests_at)
