"""Placement: events in, effects out. All slot state changes go through here.

A request is served by the first of these that applies (the code below carries the numbers):

0 `X-Slotkeeper-Bypass`: forward it unpinned, ahead of the queue.
1 It takes several slots (`n` > 1, or several prompts): forward it unpinned, once that many slots are free.
2 It carries `id_slot`: pin it to that slot, when the slot is free.
3 The messages of a free slot are the beginning of its messages: pin it there, without waiting for tokens.
4 It is a few words long: the free slot that loses least. Rendering it would cost more than it can save.
5 Its tokens are known: the cheapest place. Places are every free slot as it is, after a one-token touch (so
  that the engine loads from its RAM cache) or after a restore, and the engine's own choice. What is
  overwritten is saved first if that pays. See `candidates`.
  With several engines, prices are compared in seconds, and a slot in which a request runs is a place too: see
  `prices`. Then 3 does not apply, because it has no price.
6 Its tokens cannot be known: the free slot that loses least.
7 Otherwise it waits in our queue, never in the engine's. If only tasks on their way keep it from a free slot,
  no later request goes first.
8 If all slots share one KV buffer, the request takes the place from 1 to 6 only if its cells fit. Otherwise
  idle slots are emptied for it, or it waits as in 7. See `kv_pool`.
9 A long request of low priority waits while more urgent ones are at work on that engine. See `priority`.
10 The slot is kept for a conversation that is about to return, if that is cheaper. See `turns`.
11 A prompt that takes longer than a pass through the model waits until the engine has begun the one before,
  because it would compute both in one batch.

The order in which requests are considered: see `priority` and `turns`.

A slot gets no other task until the engine has released it (engine.md T1): see `table`.
In idle time, slots whose conversations have paused are saved: see `idle_work`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from types import MappingProxyType
from typing import Any, Final

from slotkeeper.scheduler import idle_work
from slotkeeper.scheduler.candidates import blind, changed_by_messages, cheapest, continuing
from slotkeeper.scheduler.effects import Budgeted, Effect, Learned, Observe, PoolAct, Pooled, Render
from slotkeeper.scheduler.events import (
    Acted,
    AdaptersChange,
    AdaptersSeen,
    Announced,
    Arrived,
    Closing,
    DrainAsked,
    EngineLost,
    EnginesNamed,
    EngineUp,
    Erased,
    Event,
    Exceeded,
    FilesFound,
    Finished,
    Gone,
    ModelsListed,
    NextKnown,
    Observed,
    ObserveFailed,
    Planted,
    Rendered,
    ReplyKnown,
    RequestFailed,
    Restored,
    RoomSeen,
    Saved,
    SnapshotsChanged,
    Started,
    SwapFailed,
    TimerFired,
)
from slotkeeper.scheduler.policies import kv_pool, leaving, priority, spaces, turns
from slotkeeper.scheduler.policies.adapters import set_of
from slotkeeper.scheduler.prices import computed, share_guesses
from slotkeeper.scheduler.prompts import planting
from slotkeeper.scheduler.prompts.prompt_tree import PromptTree
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.rates import WORTH_A_FILE
from slotkeeper.scheduler.requests import lifecycle
from slotkeeper.scheduler.requests.lifecycle import begin, forward, requeue
from slotkeeper.scheduler.requests.pending import Form, Pending, Plan, Queued, Running, Wait, Waiting, Weighed
from slotkeeper.scheduler.slots.engine_model import (
    TAIL,
    EngineTraits,
    Known,
    as_file,
    cells_of,
    may_share,
    reuse,
)
from slotkeeper.scheduler.slots.shadow import EngineShadow
from slotkeeper.scheduler.slots.table import EngineTable, SlotState
from slotkeeper.scheduler.snapshots import retention
from slotkeeper.scheduler.snapshots.budgets import Budgets, FolderRoom, Limits
from slotkeeper.scheduler.snapshots.catalog import Catalog
from slotkeeper.scheduler.snapshots.retention import Wanted
from slotkeeper.scheduler.state import CurrentScene, State
from slotkeeper.scheduler.types import (
    NO_ROUTER,
    ClientId,
    Crowded,
    EngineId,
    ModelName,
    Reason,
    RequestId,
    SlotId,
    Tier,
)

# -- requests that wait, and the places that they get ----------------------------------------------------

# A decision on a long prompt takes milliseconds. Once this many requests for one model have to wait in a
# round, the later ones are left without a decision until the next round (`idle_work.NEXT_ROUND`).
LOOKAHEAD: Final = 16
BEGINNING_SECONDS: Final = 0.01  # from sending a request until its engine is seen to have begun it


def arrived(state: State, event: Arrived) -> None:
    sets = state.sets(event)
    event = replace(event, adapters=sets[0] if sets else "")
    if event.space:
        event = spaces.confined(event)
    # The engine could choose a slot of other adapters.
    if event.bypass and event.rendered and state.isolates(event):
        event = replace(event, bypass=False)
    priced = event.rewritten is not None and not event.uncached  # equal hash chains may have unequal prompts
    pending = Pending(
        arrived=event,
        rendered=not event.rendered,
        plain=event.uncached,
        stage=Queued(event.at),
        other=Form(event.rewritten) if event.rewritten is not None and priced else None,
        pauses=state.pauses.ends(event.rewritten or (), event.at)
        or state.pauses.ends(event.hash_chain, event.at),
    )
    state.requests[event.request] = pending
    if not event.hints.neutral:
        state.hinted[event.request] = None
    if event.slotless:
        state.slotless.append(event.request)
    elif event.bypass:
        state.bypassing.append(event.request)
    else:
        state.queue.add(event.request, event.client)


def announced(state: State, event: Announced) -> Iterator[Effect]:
    """Poll the engines whose slots must be seen before a request can be placed there."""
    for table in state.up:
        if table.needs_poll(event.at):
            table.polls()
            yield Observe(engine=table.engine, delay=0.0)


def rendered(state: State, event: Rendered) -> Iterator[Effect]:
    """Take in the tokens of a request, whether it waits, runs or has ended."""
    pending = state.requests.get(event.request)
    if pending is None:
        return
    if not pending.rendered:
        pending.tokens_known(event, state.prompts(pending.arrived.model))
    yield from lifecycle.rendered_late(state, pending, event.at)


def settle(state: State, now: float) -> Iterator[Effect]:
    """Serve all requests that can be served now, start idle work, and ask for polls that are needed.

    A policy that nothing uses now, such as routers or priorities, is not asked.
    """
    if state.chores:
        idle_work.release(state, now)
    yield from _round_begins(state, now)
    yield from lifecycle.bypass(state, now)
    yield from _send_steered(state, now)
    yield from lifecycle.fail_open(state, now)
    if state.routers or state.slotless:
        yield from leaving.settle_swaps(state, now)
    yield from _serve(state, now)
    due_at = leaving.due_at(state, now) if state.routers else inf
    if state.hinted:
        yield from priority.expire(state, now)
        due_at = min(due_at, priority.due_at(state, now))
    due_at = min(due_at, state.kept_slots_until)
    yield from idle_work.settle(state, now, or_at=due_at)
    if state.drained:
        yield from leaving.settle_drains(state, now)
    if any(table.traits.adapters for table in state.up):
        yield from spaces.ask_adapters(state, now)
    for table in state.tables.values():
        delay = table.watch(waiting=state.waiting, now=now)
        if delay is not None:
            table.polls()
            yield Observe(engine=table.engine, delay=delay)


def _round_begins(state: State, now: float) -> Iterator[Effect]:
    for table in state.tables.values():
        table.round_begins(now)
        if state.full(table):
            table.hold_back()
        if table.poisoned:
            yield from idle_work.erase_poisoned(state, table, now)


def _serve(state: State, now: float) -> Iterator[Effect]:
    """Give slots to queued requests, while there are free slots."""
    left_waiting, scene = Counter[ModelName](), CurrentScene(state, now)
    state.cut_short, state.kept_slots_until = False, inf
    queue, tried = _served_next(state, now), list[RequestId]()
    for request in turns.in_order(state, queue, now):
        pending, begun = state.requests[request], False
        queued = pending.queued
        waits = queued.waits_in is not None and queued.waits_in == scene.drawn()  # in this scene already
        if not waits:
            model = pending.arrived.model
            tables = state.open_for(model)
            if not tables or any(table.outdated(now) for table in tables):
                continue  # it has no engine, or GET /slots is being read
            if left_waiting[model] == LOOKAHEAD:
                state.cut_short = True
                continue
            begun = yield from _begins(state, pending, scene, now)
            yield from turns.passed(state, pending, queue, tried) if begun else ()
            left_waiting[model] += pending.rendered and not begun
        tried.append(request)
        if queued.waits_for and not begun:
            queued.waits_for.waited_for()
        if begun or _hold(queued):
            scene.changed()
            if (at := pending.table) and state.full(at):
                at.hold_back()
            if not _any_free(state):
                break


def _begins(state: State, pending: Pending, scene: CurrentScene, now: float) -> Generator[Effect, None, bool]:
    """Begin a request, or record that it keeps waiting, and for what. Returns whether it begins."""
    plan = _decide(state, pending, now)
    behind, shares, lacking = None, False, 0
    kept = turns.kept_until(state, pending, plan, now)  # 10
    if plan:
        behind = priority.stands_behind(state, pending, plan) if pending.divisible else None  # 9
        shares = _shares_batch(state, pending, plan, now)  # 11
        plan = replace(plan, wait=True) if behind or kept or shares else plan
    if plan and not plan.wait:
        short = kv_pool.shortage(state, pending, plan, now) if cells_of(plan.table.traits) else None  # 8
        if not short:
            if state.hinted:
                yield from priority.noted(state, pending, now)
            yield begin(state, pending, plan, now)
            return True
        yield from _make_room(state, pending, plan, short, now)
        scene.changed()
        lacking = short.cells
    starves = shares and state.overtaken(pending)
    holds = (plan.table,) if plan and starves else _holds(state, pending, plan, now)
    if pending.waits_on(plan, scene.drawn(), behind=behind, holds=holds, lacking=lacking) and plan:
        yield priority.stood_back(pending, plan, now)
    if kept and plan:
        yield from turns.keeps(state, pending, plan, kept)
    return False


def _shares_batch(state: State, pending: Pending, plan: Plan, now: float) -> bool:
    """Whether the engine would compute this prompt in one batch with one that was sent just before.

    Then both clients would wait until both are computed. If this one is sent when the engine has begun the
    other, its client waits only one pass through the model and that moment longer, and the other client is
    not held up.
    Beside a third prompt that fills each batch, it would wait for a whole batch more. Once PASSES requests
    have overtaken it, no later one begins there, or a stream of short prompts would keep it back for ever.
    """
    table, found = plan.table, plan.reuse_plan
    if pending.prompt is None or found is None:
        return False
    seconds = (len(pending.prompt) - found.reuse) / table.rates.marginal_prefill
    if seconds <= table.rates.pass_seconds + BEGINNING_SECONDS:
        return False
    owners = (table.owners[slot] for slot in table.in_state(SlotState.LAUNCHED))
    others = (state.requests.get(owner) for owner in owners if owner)
    entering = {other.arrived.request for other in others if other and isinstance(other.stage, Running)}
    return bool(entering) and not table.work.ahead(now, entering)


def _make_room(
    state: State, pending: Pending, plan: Plan, short: kv_pool.Shortage, now: float
) -> Iterator[Effect]:
    """Empty idle slots for a request that lacks cells, if that is enough."""
    table, request = plan.table, pending.arrived.request
    if short.cells and not pending.lacked_cells:
        yield Pooled(
            request=request, engine=table.engine, act=PoolAct.WAITED, slot=plan.slot, cells=short.cells
        )
    for slot in short.victims:
        yield from idle_work.empty(state, table, slot, pending, now)


def _served_next(state: State, now: float) -> Sequence[RequestId]:
    """Return the queued requests that may be served; none if no slot is free: a long queue costs nothing.

    Bypassing requests, which wait only for pinned tasks to begin, go before all others of their models. One
    whose engines are all down, drained or being unloaded holds nothing back.
    """
    if not _any_free(state):
        return ()
    queue = priority.in_turn(state, now) if state.hinted else tuple(state.queue)
    models = {state.requests[request].arrived.model for request in state.bypassing}
    held = {model for model in models if state.open_for(model)}
    return [each for each in queue if state.requests[each].arrived.model not in held] if held else queue


def _hold(queued: Queued) -> bool:
    """Keep later requests away from the engines that this one holds. Returns whether there are any."""
    for table in queued.holds:
        table.hold_back()
    return bool(queued.holds)


def _any_free(state: State) -> bool:
    return any(table.idle and not table.awaited for table in state.up)


def _holds(state: State, pending: Pending, plan: Plan | None, now: float) -> Sequence[EngineTable]:
    """Return the engines on which no later request gets a slot.

    Tasks on their way keep this request from a free slot for milliseconds. If later requests were sent
    meanwhile, the situation would repeat itself: under a constant stream of pinned requests it would never
    begin.
    """
    request, pinned = pending.arrived, pending.arrived.to_be_pinned
    if not pending.rendered:
        return ()
    if plan is not None and not plan.wait:  # it waits for cells
        return (plan.table,) if state.overtaken(pending) else ()
    if plan is not None:  # it waits for the best place
        return () if pinned or plan.table.open_for_unpinned(now) else (plan.table,)
    room = state.with_room(request)
    if room and not any(table.open_for(now, pinned=pinned) for table in room):
        return state.open_for(request.model)
    if room and (pinned or not state.isolates(request)):
        return ()
    return _holds_in_turn(state, pending)


def _holds_in_turn(state: State, pending: Pending) -> Sequence[EngineTable]:
    """Return the engines whose running tasks must end for it, once enough requests have overtaken it."""
    tables, copies = state.open_for(pending.arrived.model), pending.arrived.copies
    ours = [table for table in tables if table.own >= min(copies, len(table.states))]
    return ours if ours and state.overtaken(pending) else ()


def _decide(state: State, pending: Pending, now: float) -> Plan | None:
    """Decide on a request's LoRA adapters, if its engines differ in them, and its place. None: it waits."""
    sets = state.sets(pending.arrived)
    if len(sets) > 1:
        sets.sort(key=partial(_price_under, state, pending, now))
    if sets and sets[0] != pending.arrived.adapters:
        pending.moves_to(sets[0], state.prompts(pending.arrived.model))
    return _decide_form(state, pending, now)


def _price_under(state: State, pending: Pending, now: float, adapters: str) -> tuple[bool, float]:
    """Return whether a request under these adapters would have to wait, and the price of its place."""
    trial = replace(pending)
    trial.moves_to(adapters, state.prompts(pending.arrived.model))
    plan = _place(state, trial, now)
    return plan is None or plan.wait, plan.price if plan else 0.0


def _decide_form(state: State, pending: Pending, now: float) -> Plan | None:
    """Decide which form the request takes, if the rules offer another, and where that goes.

    None: it waits.
    """
    other, request = pending.other, pending.arrived
    if other is None:
        return _place(state, pending, now)
    if not pending.rendered:
        plan = _form_by_messages(state, request, other, now)
        if plan is not None:
            pending.chooses(Weighed(None, None, taken=True), state.prompts(request.model))
        return plan
    own_plan = _place(state, pending, now)
    as_changed = replace(pending, arrived=replace(request, hash_chain=other.hash_chain), prompt=other.prompt)
    changed_plan = _place(state, as_changed, now)
    price, price_changed = computed(own_plan, pending.prompt), computed(changed_plan, other.prompt)
    weighed = Weighed.of(price, price_changed, moved=request.moved, fits=other.fits(request.most))
    plan = changed_plan if weighed.taken else own_plan
    if plan and not plan.wait:
        pending.chooses(weighed, state.prompts(request.model))
    return plan


def _form_by_messages(state: State, request: Arrived, other: Form, now: float) -> Plan | None:
    """Return the slot where the changed form continues, before any token is known. None: tokens decide."""
    choosable = request.pinnable and request.id_slot is None and request.copies == 1 and not request.most
    tables = state.fitting(request) if choosable else []
    if len(tables) != 1:  # with several engines, tokens decide
        return None
    return changed_by_messages(tables, request.hash_chain, other.hash_chain, now)


def _place(state: State, pending: Pending, now: float) -> Plan | None:
    """Return the place for one form of a request, by the numbers in `placement`. None: it waits (7)."""
    request = pending.arrived
    if request.copies > 1:
        tables = state.with_room(request)
        return _named(blind(tables, pinnable=False, now=now, catalog=state.catalog), Reason.UNPINNABLE)  # 1
    if request.id_slot is not None:
        open_tables = state.open_for(request.model) if request.action else state.fitting(request)
        tables = open_tables[:1] if request.action else sorted(open_tables, key=lambda t: t.load)
        return _clients_own(tables, request.id_slot, pending, now)  # 2
    if request.generates and not request.pinnable and state.isolates(request):
        return _behind(state, pending, spaces.steered(state, pending, now))
    return _by_content(state, pending, now)


def _continuing(pending: Pending, tables: Sequence[EngineTable], now: float) -> Plan | None:
    """Return the slot that holds the conversation, by its messages; None where tokens decide."""
    request = pending.arrived
    counted = len(tables) > 1 or pending.divisible
    if counted and request.rendered and (pending.prompt or not pending.rendered):
        return None
    space = request.space  # the engine's RAM cache could give it a state of another one
    safe = [table for table in tables if not (table.shadow.isolates(space) and table.shadow.may_load)]
    return continuing(safe, request.hash_chain, now)


def _by_content(state: State, pending: Pending, now: float) -> Plan | None:
    """Return the place where the contents of slots and files save most: 3 to 6 of `placement`.

    None: it waits (7).
    """
    request, tables = pending.arrived, state.fitting(pending.arrived)
    if request.pinnable:
        if plan := _continuing(pending, tables, now):
            return plan  # 3
        if request.brief:
            return _losing_least(state, request, Reason.BRIEF, now)  # 4
    if not pending.rendered:
        return None
    if pending.prompt:
        plan = cheapest(  # 5
            tables,
            pending.prompt,
            hash_chain=request.hash_chain,
            pinnable=request.pinnable,
            now=now,
            catalog=state.catalog,
            plain=pending.plain,
            own_scales=request.lora is not None,
        )
        return _behind(state, pending, plan)
    reason = Reason.UNRENDERED if request.pinnable else Reason.UNPINNABLE
    return _losing_least(state, request, reason, now)  # 6


def _behind(state: State, pending: Pending, plan: Plan | None) -> Plan | None:
    """Return the plan; it waits if a file that will soon be there gives back enough more of the prompt."""
    prompt, reuse_plan = pending.prompt, plan.reuse_plan if plan else None
    if plan is None or prompt is None or reuse_plan is None or pending.plain:
        return plan
    if any(gain - reuse_plan.reuse > least for gain, least in _coming(state, pending, prompt, plan.table)):
        return replace(plan, wait=True)
    return plan


def _coming(state: State, but: Pending, prompt: Tokens, table: EngineTable) -> Iterator[tuple[int, float]]:
    """Yield how much of a prompt each coming file gives back, and how much justifies waiting for it; tokens.

    A file that is written needs only its check, which takes about as long as a restore.
    """
    rates = table.rates
    for contents in state.coming.values():
        price = 2 * rates.restore_price(table.bytes_of(contents))
        yield reuse(as_file(contents, table.traits), prompt, table.traits), price
    for other in state.requests.values():
        if other.preparing and other is not but:
            shared = planting.kept(other.preparing.plan.steps, other.preparing.left)
            if shared and (common := prompt.lcp(shared)) >= len(shared) - TAIL:
                yield common, WORTH_A_FILE


def _losing_least(state: State, request: Arrived, reason: Reason, now: float) -> Plan | None:
    """Return the slot that loses least, regardless of what it shares with the request."""
    pinnable, space = request.pinnable, request.space
    tables, catalog = state.fitting(request), state.catalog
    return _named(blind(tables, pinnable=pinnable, now=now, catalog=catalog, space=space), reason)


def _named(plan: Plan | None, reason: Reason) -> Plan | None:
    return replace(plan, reason=reason) if plan else None


def _clients_own(tables: Sequence[EngineTable], id_slot: int, pending: Pending, now: float) -> Plan | None:
    """Return a plan for the client's `id_slot`.

    The engine accepts any integer: as an unsigned one of 64 bits, modulo the number of slots (engine.md T8).
    """
    for table in tables:
        slot = SlotId(id_slot % 2**64 % len(table.states))
        if table.open_for_pins(now) and table.states[slot] is SlotState.IDLE:
            return spaces.emptied(Plan(table=table, slot=slot, reason=Reason.CLIENT_CHOSE), pending, now)
    return None


def _send_steered(state: State, now: float) -> Iterator[Effect]:
    """Send steered requests whose prompts are in place, once no pinned task is on its way.

    No other request begins on their engines before that.
    """
    closed = [table for pending, table in state.clearing() if state.overtaken(pending)]
    for request in tuple(state.steered):
        pending = state.requests[request]
        owned = pending.owned
        if owned is None:
            state.steered.remove(request)
            requeue(state, pending)
        elif not (owned[0].leaving or owned[0].open_for_unpinned(now)):
            closed.append(owned[0])
        else:
            idle, busy = spaces.rivals(state, owned[0], pending)
            if owned[0].leaving or idle or spaces.outdated(owned[0], pending):
                state.steered.remove(request)
                owned[0].move(owned[1], SlotState.IDLE, None, now)
                requeue(state, pending)
            elif not busy:
                state.steered.remove(request)
                yield forward(pending, now)
            elif state.overtaken(pending):
                closed.append(owned[0])
    for table in closed:
        table.hold_back()


# -- for observers: what a queued request waits for ------------------------------------------------------


def waiting(state: State, pending: Pending) -> Waiting | None:
    """Return what a request waits for; None if it is not queued."""
    queued = pending.stage
    if not isinstance(queued, Queued):
        return None
    tables = state.open_for(pending.arrived.model)
    if not tables:
        return Waiting(_without_engine(state, pending.arrived.model))
    if queued.stands_behind is not None:
        return Waiting(Wait.PRIORITY, (queued.stands_behind,))
    at_work = state.at_work(tables)
    if all(map(state.full, tables)):
        return Waiting(Wait.RUNNING, at_work)
    if pending.lacked_cells:
        return Waiting(Wait.CELLS, at_work)
    if not any(table.idle for table in tables):
        return Waiting(Wait.SLOTS if at_work else Wait.IDLE_WORK, at_work)
    if all(table.unseen or table.unsettled or table.orphans for table in tables):
        return Waiting(Wait.LOOK)
    if not pending.rendered:
        return Waiting(Wait.TOKENS)
    if queued.waits_for is not None:
        return Waiting(Wait.BEST_SLOT, state.at_work([queued.waits_for]))
    return Waiting(Wait.KEPT_SLOT if queued.kept_until else Wait.TURN)


def _without_engine(state: State, model: ModelName) -> Wait:
    if state.up_for(model):
        return Wait.DRAINED
    return Wait.MODEL if model else Wait.ENGINE


# -- engines that come and go, and other events ----------------------------------------------------------


def engine_up(state: State, event: EngineUp) -> Iterator[Effect]:
    """Take in an engine that answers: no slot is given out before GET /slots has shown them."""
    table = state.tables.get(event.engine)
    if table is None:
        shadow = EngineShadow(event.traits)
        table = state.tables[event.engine] = EngineTable(event.engine, shadow, model=event.model)
    for router in state.routers.values():
        router.came_up(event.engine, event.at)
    table.came_up(event.traits, event.at, fresh=event.fresh, leaving=event.engine in state.drained)
    share_guesses(state.up_for(table.model))
    yield from _adopted(state, table, event.at)
    yield from lifecycle.close_ended(state)
    state.budget_again()


def _adopted(state: State, table: EngineTable, now: float) -> Iterator[Effect]:
    """Take over the requests that were sent to this engine before it was known, and have them rendered."""
    adopted = [*_still_out(state, table, now), *_ended_early(state, table, now)]
    for pending in adopted:
        table.computed_for_others()
        if not pending.rendered:
            yield Render(request=pending.arrived.request)


def _still_out(state: State, table: EngineTable, now: float) -> Iterator[Pending]:
    """Count requests that were sent earlier as sent here: slots are uncertain until they end or are seen.

    Yields those that had no place before.
    """
    for pending in state.requests.values():
        sent_open = pending.plan is None and table.engine == state.fallback(pending.arrived.model)
        if isinstance(pending.stage, Running) and (sent_open or pending.table is table):
            pending.runs_unseen(table, now)
            if sent_open:
                yield pending


def _ended_early(state: State, table: EngineTable, now: float) -> Iterator[Pending]:
    """Look for the slots of requests that have ended, the last one first: it has the newest task."""
    for pending in state.take_early(table.engine):
        request, done = pending.arrived, pending.finished
        if done is None or not _of_one_set(table, pending):
            continue
        pending.adopted(table)
        adapters = set_of(table.traits.adapters, request.lora)
        pending.moves_to(adapters, state.prompts(request.model))
        table.shadow.sends(pending.arrived.space)
        state.requests[request.request] = pending
        table.ended_early(request.request, request.copies, done.left, now)
        yield pending


def _of_one_set(table: EngineTable, pending: Pending) -> bool:
    """Whether all of the request's tokens were certainly computed with the adapters that it names.

    The engine's own scales, and those of a state that it continued from, may have changed since.
    """
    done = pending.finished
    return not table.traits.adapters or (
        pending.arrived.lora is not None and done is not None and done.cached == 0
    )


def files_found(state: State, event: FilesFound) -> None:
    """Take over the facts about slot files only: other facts may have been learned meanwhile."""
    if table := state.tables.get(event.engine):
        seen = event.traits
        table.learn(
            replace(
                table.traits,
                slot_files=seen.slot_files,
                state_version=seen.state_version,
                files_carry=seen.files_carry,
                fingerprint=seen.fingerprint,
                projector=seen.projector,
            )
        )
    state.budget_again()


def learned(state: State, before: Mapping[EngineId, EngineTraits]) -> Iterator[Effect]:
    """Report flags that were learned since. Flags read from the command line are not reported."""
    for engine, table in state.tables.items():
        now, known = table.traits, before.get(engine)
        if now is known:
            continue
        for name, how in now.knowledge.items():
            value = getattr(now, name)
            news = known is None or (known.known(name), getattr(known, name)) != (how, value)
            if news and how is not Known.FLAGS:
                yield Learned(engine=engine, name=name, value=value, how=how)


def budgeted(state: State) -> Iterator[Effect]:
    """Report budgets that differ noticeably from those last reported; none before a folder was seen."""
    if state.rooms and (state.told is None or state.budgets.differ(state.told)):
        state.told = state.budgets
        yield Budgeted(budgets=state.budgets)


def engine_lost(state: State, event: EngineLost) -> Iterator[Effect]:
    if table := state.tables.get(event.engine):
        table.went_down(event.at, back_by=event.at + state.limits.engine_wait if event.returns else -inf)
    yield from lifecycle.close_ended(state)


def snapshots_changed(state: State, event: SnapshotsChanged) -> Iterable[Effect]:
    """Take in files that were found, moved or lost. Slots whose files are gone are not saved again."""
    if event.gone:
        idle_work.not_saved_again(state)
    return retention.snapshots_changed(state, event)


def timer_fired(state: State, event: TimerFired) -> None:
    """Clear the pending timer. An earlier timer may fire too, so the time is checked."""
    if state.wakes_at is not None and event.at >= state.wakes_at - EARLY:
        state.wakes_at = None


def closing(state: State, _: Closing) -> None:
    """Take in that the sidecar is being stopped."""
    state.closing = True


# -- the public interface --------------------------------------------------------------------------------

EARLY: Final = 0.01  # seconds by which a timer may fire too early
# What takes in each event. It changes the state and returns or yields the effects, if there are any.
TAKE_IN: Final[Mapping[type[Event], Callable[[State, Any], Iterable[Effect] | None]]] = MappingProxyType(
    {
        # requests
        Announced: announced,
        Arrived: arrived,
        Rendered: rendered,
        Started: lifecycle.started,
        Finished: lifecycle.finished,
        Exceeded: kv_pool.exceeded,
        Acted: lifecycle.acted,
        Gone: lifecycle.gone,
        ReplyKnown: lifecycle.reply_known,
        NextKnown: lifecycle.next_known,
        # steps in slots, and files
        Planted: lifecycle.step_ended,
        Saved: lifecycle.step_ended,
        Restored: lifecycle.step_ended,
        Erased: lifecycle.step_ended,
        SnapshotsChanged: snapshots_changed,
        RoomSeen: retention.room_seen,
        # engines
        EngineUp: engine_up,
        FilesFound: files_found,
        EngineLost: engine_lost,
        Observed: lifecycle.observed,
        ObserveFailed: lifecycle.observe_failed,
        RequestFailed: lifecycle.request_failed,
        AdaptersChange: spaces.adapters_changed,
        AdaptersSeen: spaces.adapters_changed,
        DrainAsked: leaving.drain_asked,
        EnginesNamed: leaving.engines_named,
        ModelsListed: leaving.models_listed,
        SwapFailed: leaving.swap_failed,
        # the sidecar
        TimerFired: timer_fired,
        Closing: closing,
    }
)


class Placement:
    """All decisions about the slots of all engines."""

    def __init__(self, *known: EngineId, limits: Limits | None = None) -> None:
        self._state = State(engines=known, limits=limits or Limits())

    def __repr__(self) -> str:
        state = self._state
        tables = " ".join(map(repr, state.tables.values()))
        return f"<Placement {len(state.requests)} requests, {len(state.queue)} queued | {tables}>"

    def on(self, event: Event) -> list[Effect]:
        """Take in one event, and return what must be done now."""
        self._state.at = event.at
        before = {engine: table.traits for engine, table in self._state.tables.items()}
        taken = TAKE_IN[type(event)](self._state, event) or ()
        effects = [*taken, *settle(self._state, event.at)]
        news = (*learned(self._state, before), *budgeted(self._state))
        return [*effects, *news, *self._state.released()]

    # -- for observers ---------------------------------------------------------------------------

    @property
    def tables(self) -> dict[EngineId, EngineTable]:
        return self._state.tables

    @property
    def queued(self) -> int:
        return len(self._state.queue)

    @property
    def line(self) -> Sequence[RequestId]:
        """The waiting requests, the next one first, as far as the order is known now."""
        return (*self._state.bypassing, *priority.in_turn(self._state, self._state.at))

    @property
    def divided(self) -> bool:
        """Whether a request is computed in pieces, or waits to be: what its slot holds must not be lost."""
        state = self._state
        return any(p.divisible for r in state.hinted if (p := state.requests.get(r)))

    def needs_poll(self, now: float) -> bool:
        """Whether any engine must be polled before a request that arrives now can be placed there."""
        return any(table.needs_poll(now) for table in self._state.up)

    def has_waiting(self) -> bool:
        """Whether any request is queued for a slot."""
        return len(self._state.queue) > 0

    def waiting_of(self, client: ClientId) -> int:
        """Return how many requests of this client are queued."""
        return self._state.queue.of(client)

    def no_room_for(self, client: ClientId) -> Crowded | None:
        """Return why another request of this client may not be queued; None if it may."""
        state, limits = self._state, self._state.limits
        if len(state.queue) + len(state.bypassing) >= limits.waiting:
            return Crowded.ALL
        return Crowded.CLIENT if state.queue.of(client) >= limits.waiting_of_one else None

    def wanted_elsewhere(self, request: RequestId, prompt: Tokens) -> Sequence[Wanted]:
        """Return the states of a newly rendered prompt that are worth looking for in the shared store."""
        return tuple(retention.wanted_elsewhere(self._state, request, prompt))

    @property
    def budgets(self) -> Budgets:
        """The budgets for snapshots that are in force."""
        return self._state.budgets

    @property
    def rooms(self) -> Mapping[Tier, FolderRoom]:
        """The file systems of the folders for snapshots, as last seen."""
        return self._state.rooms

    @property
    def catalog(self) -> Catalog:
        return self._state.catalog

    def tree(self, model: ModelName = NO_ROUTER) -> PromptTree:
        """Return all prompts that were sent to this model."""
        return self._state.tree(model)

    @property
    def busiest(self) -> ModelName:
        """The model that received the most tokens."""
        trees = self._state.trees
        return max(trees, key=lambda model: trees[model].tokens, default=NO_ROUTER)

    @property
    def serving(self) -> bool:
        """Whether any request runs or waits."""
        return self._state.waiting or any(table.serving for table in self._state.up)

    def holds(self, request: RequestId) -> bool:
        """Whether a slot still holds what this request left there, or will again after idle work in it."""
        homes = (chore.home for chore in self._state.chores.values())
        slots = (contents for table in self._state.tables.values() for contents in table.shadow.slots)
        return any(contents and contents.request == request for contents in (*homes, *slots))

    def works_for(self, request: RequestId) -> bool:
        """Whether an engine may still work for a request whose client left; `Released` follows then."""
        return any(table.works_for(request) for table in self._state.tables.values())

    def pool_of(self, table: EngineTable) -> dict[str, int] | None:
        """Return the cells of an engine's shared KV buffer, and those in use; None if none is shared."""
        cells = cells_of(table.traits)
        return {"cells": cells, "taken": kv_pool.in_use(self._state, table)} if cells else None

    def may_lack_cells(self, engine: EngineId) -> bool:
        """Whether a request may fail there because the KV buffer is full that slots share."""
        table = self.tables.get(engine)
        return table is not None and may_share(table.traits)

    def back_by(self, now: float, model: ModelName) -> float | None:
        """Return until when to wait for an engine of this model; None if one is up or none is expected."""
        return self._state.back_by(now, model)

    def drained(self, engine: EngineId) -> bool:
        """Whether the engine was drained and is at rest."""
        return self._state.drained.get(engine, False)

    def unsaved(self, now: float) -> bool:
        """Whether anything remains to be saved before the sidecar stops."""
        return idle_work.left(self._state, now)

    def waiting(self, request: RequestId) -> Waiting | None:
        """Return what a queued request waits for; None if it is not queued."""
        pending = self._state.requests.get(request)
        return waiting(self._state, pending) if pending else None

    def pending(self, request: RequestId) -> Pending | None:
        """Return a request that has not ended."""
        return self._state.requests.get(request)
