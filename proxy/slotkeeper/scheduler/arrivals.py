"""Give slots to the requests that wait: the decision tree of `placement`, in code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from slotkeeper.scheduler import idle_work, kv_pool, launching, leaving, planting, priority, spaces
from slotkeeper.scheduler.candidates import blind, changed_by_messages, cheapest, continuing
from slotkeeper.scheduler.effects import Effect, Observe, PoolAct, Pooled
from slotkeeper.scheduler.engine_model import TAIL
from slotkeeper.scheduler.events import Arrived, Rendered
from slotkeeper.scheduler.launching import begin, forward, requeue
from slotkeeper.scheduler.pending import Form, Pending, Plan, Stage, Wait, Waiting, Weighed
from slotkeeper.scheduler.prices import computed
from slotkeeper.scheduler.rates import WORTH_A_FILE
from slotkeeper.scheduler.slot_contents import as_file, reuse
from slotkeeper.scheduler.state import CurrentScene, State
from slotkeeper.scheduler.table import EngineTable, SlotState
from slotkeeper.scheduler.tokens import Tokens
from slotkeeper.scheduler.types import ModelName, Reason, RequestId, SlotId

# A decision on a long prompt takes milliseconds. Once this many requests for one model have to wait in a
# round, the later ones are left without a decision until the next round (`idle_work.NEXT_ROUND`).
LOOKAHEAD: Final = 16
BEGINNING_SECONDS: Final = 0.01  # from sending a request until its engine is seen to have begun it


def arrived(state: State, event: Arrived) -> None:
    sets = state.sets(event)
    event = spaces.confined(replace(event, adapters=sets[0] if sets else ""))
    # The engine could choose a slot of other adapters.
    if event.bypass and event.rendered and state.isolates(event):
        event = replace(event, bypass=False)
    priced = event.rewritten is not None and not event.uncached  # equal hash chains may have unequal prompts
    pending = Pending(
        arrived=event,
        rendered=not event.rendered,
        plain=event.uncached,
        queued_at=event.at,
        other=Form(event.rewritten) if event.rewritten is not None and priced else None,
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


def rendered(state: State, event: Rendered) -> None:
    pending = state.requests.get(event.request)
    if pending is None or pending.rendered:
        return
    pending.tokens_known(event, state.prompts(pending.arrived.model))


def settle(state: State, now: float) -> Iterator[Effect]:
    """Serve all requests that can be served now, start idle work, and ask for polls that are needed."""
    idle_work.release(state, now)
    for table in state.tables.values():
        table.round_begins(now)
    yield from launching.bypass(state, now)
    yield from _send_steered(state, now)
    yield from launching.fail_open(state, now)
    yield from leaving.settle_swaps(state, now)
    yield from leaving.send_slotless(state, now)
    yield from _serve(state, now)
    yield from priority.expire(state, now)
    due_at = min(leaving.due_at(state, now), priority.due_at(state, now))
    yield from idle_work.settle(state, now, or_at=due_at)
    yield from leaving.settle_drains(state, now)
    yield from spaces.ask_adapters(state, now)
    for table in state.tables.values():
        delay = table.watch(waiting=state.waiting, now=now)
        if delay is not None:
            table.polls()
            yield Observe(engine=table.engine, delay=delay)


def _serve(state: State, now: float) -> Iterator[Effect]:
    """Give slots to queued requests in queue order, while there are free slots."""
    left_waiting, scene = Counter[ModelName](), CurrentScene(state, now)
    state.cut_short = False
    for request in _served_next(state, now):
        pending, begun = state.requests[request], False
        if not scene.keeps_waiting(pending):
            model = pending.arrived.model
            if any(table.outdated(now) for table in state.open_for(model)):
                continue  # GET /slots is being read
            if not state.open_for(model):
                continue
            if left_waiting[model] == LOOKAHEAD:
                state.cut_short = True
                continue
            begun = yield from _begins(state, pending, scene, now)
            left_waiting[model] += pending.rendered and not begun
        if pending.waits_for and not begun:
            pending.waits_for.waited_for()
        if begun or _hold(pending):
            scene.changed()
            if not _any_free(state):
                break


def _begins(state: State, pending: Pending, scene: CurrentScene, now: float) -> Generator[Effect, None, bool]:
    """Begin a request, or record that it keeps waiting, and for what. Returns whether it begins."""
    plan = _decide(state, pending, now)
    behind = priority.stands_behind(state, pending, plan)  # 9
    shares = plan is not None and _shares_batch(state, pending, plan, now)  # 10
    if plan and (behind or shares):
        plan = replace(plan, wait=True)
    short = kv_pool.shortage(state, pending, plan, now)  # 8
    if plan and not plan.wait and not short:
        yield from priority.noted(state, pending, now)
        yield begin(state, pending, plan, now)
        return True
    if plan and short:
        yield from _make_room(state, pending, plan, short, now)
        scene.changed()
    holds = (plan.table,) if plan and shares else _holds(state, pending, plan, now)
    lacking = short.cells if short else 0
    if pending.waits_on(plan, scene.drawn(), behind=behind, holds=holds, lacking=lacking) and plan:
        yield priority.stood_back(pending, plan, now)
    return False


def _shares_batch(state: State, pending: Pending, plan: Plan, now: float) -> bool:
    """Whether the engine would compute this prompt in one batch with one that was sent just before.

    Then both clients would wait until both are computed. If this one is sent when the engine has begun the
    other, its client waits only one pass through the model and that moment longer, and the other client is
    not held up.
    Beside a third prompt that fills each batch, it would wait for a whole batch more. Meanwhile no later
    request may begin there, or a stream of short prompts would keep this one back for ever.
    """
    table, found = plan.table, plan.reuse_plan
    if pending.prompt is None or found is None:
        return False
    seconds = (len(pending.prompt) - found.reuse) / table.rates.marginal_prefill
    if seconds <= table.rates.pass_seconds + BEGINNING_SECONDS:
        return False
    owners = (table.owners[slot] for slot in table.in_state(SlotState.LAUNCHED))
    others = (state.requests.get(owner) for owner in owners if owner)
    entering = {other.arrived.request for other in others if other and other.stage is Stage.RUNNING}
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
    queue = priority.in_turn(state, now)
    models = {state.requests[request].arrived.model for request in state.bypassing}
    held = {model for model in models if state.open_for(model)}
    return [each for each in queue if state.requests[each].arrived.model not in held] if held else queue


def _hold(pending: Pending) -> bool:
    """Keep later requests away from the engines that this one holds. Returns whether there are any."""
    for table in pending.holds:
        table.hold_back()
    return bool(pending.holds)


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
            bounds=state.bounds,
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
        if other.stage is Stage.PREPARING and other.plan and other is not but:
            shared = planting.kept(other.plan.steps, other.steps_left)
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
    closed = [table for pending, table in spaces.clearing(state) if state.overtaken(pending)]
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


# -- for observers: what a queued request waits for ----------------------------------------------------------


def waiting(state: State, pending: Pending) -> Waiting | None:
    """Return what a request waits for; None if it is not queued."""
    if pending.stage is not Stage.QUEUED:
        return None
    tables = state.open_for(pending.arrived.model)
    if not tables:
        return Waiting(_without_engine(state, pending.arrived.model))
    if pending.stands_behind is not None:
        return Waiting(Wait.PRIORITY, (pending.stands_behind,))
    at_work = _at_work(state, tables)
    if pending.lacked_cells:
        return Waiting(Wait.CELLS, at_work)
    if not any(table.idle for table in tables):
        return Waiting(Wait.SLOTS if at_work else Wait.IDLE_WORK, at_work)
    if all(table.unseen or table.unsettled or table.orphans for table in tables):
        return Waiting(Wait.LOOK)
    if not pending.rendered:
        return Waiting(Wait.TOKENS)
    if pending.waits_for is not None:
        return Waiting(Wait.BEST_SLOT, _at_work(state, [pending.waits_for]))
    return Waiting(Wait.TURN)


def _without_engine(state: State, model: ModelName) -> Wait:
    if state.up_for(model):
        return Wait.DRAINED
    return Wait.MODEL if model else Wait.ENGINE


def _at_work(state: State, tables: Sequence[EngineTable]) -> tuple[RequestId, ...]:
    """Return the clients' requests that run on these engines."""
    sent = [request for table in tables for request in (*table.owners, *table.unsettled)]
    return tuple(dict.fromkeys(request for request in sent if request in state.requests))
