"""Engines that are taken out of use: models that a router unloads for others, and drained engines.

Nothing begins there, running answers end, and what the slots hold is saved at once. So the conversations
continue from files: on other engines, or here once the model is loaded again, as after any restart.

A router evicts a model without notice, and the contents of its slots would be lost. So requests for an
unloaded model wait here while we prepare the swap. The victim is unloaded once its slots are saved, and only
then is the other model loaded.

* Requests for loaded models go first, but a request waits for its model at most `Limits.swap_wait` seconds
  from its arrival or from the last swap. So two agents on two models do not thrash, and neither starves.
* A model without requests stays loaded for as long as a swap takes: its agent's next turn may be on its way.
  This wait costs at most twice what knowing the future would.

llama-swap itself chooses the models that it unloads for another. We unload none: all that it may unload are
prepared, the other model is loaded, and the listing shows which ones have left (`Router.stays`).

An operator drains an engine, or drops it from the list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf

from slotkeeper.scheduler import idle_work
from slotkeeper.scheduler.effects import Drained, Effect, Forward, LoadModel, Refuse, UnloadModel
from slotkeeper.scheduler.events import DrainAsked, EnginesNamed, ModelsListed, SwapFailed
from slotkeeper.scheduler.policies.router import LOADED, ModelStatus, Router
from slotkeeper.scheduler.state import State
from slotkeeper.scheduler.types import EngineId, ModelName, Reason

# -- swaps of a router's models ---------------------------------------------------------------------------


def models_listed(state: State, event: ModelsListed) -> None:
    """Take in a router's list of models; an empty one means that the router does not answer."""
    router = state.routers.setdefault(event.router, Router(event.router))
    if event.models:
        gone = router.models.keys() - {view.engine for view in event.models}
        router.listed(event.models, event.most, chooses=event.chooses)
        for engine in gone:
            _forget(state, engine)
        for view in event.models:
            if view.foreign:  # its engine will never be up for us
                router.came_up(view.engine, event.at)
    else:
        router.lost(event.at + state.limits.engine_wait)
    state.mark_leaving()


def _forget(state: State, engine: EngineId) -> None:
    """Forget a model that its router no longer lists, with everything known of it."""
    table = state.tables.get(engine)
    if table is None or table.up:
        return
    del state.tables[engine]
    _forget_prompts(state, table.model)


def _forget_prompts(state: State, model: ModelName) -> None:
    """Forget the prompts of a router's model that no engine serves any more."""
    if model and not any(table.model == model for table in state.tables.values()):
        state.trees.pop(model, None)


def swap_failed(state: State, event: SwapFailed) -> None:
    for router in state.routers.values():
        router.swap_failed(event.engine, event.at, broken=event.broken)
    state.mark_leaving()


def settle_swaps(state: State, now: float) -> Iterator[Effect]:
    """Take the next step of every router's swap, and send or refuse requests that wait for their models."""
    for router in state.routers.values():
        yield from _refused(state, router, now)
        yield from _passed_on(state, router)
        if router.base not in state.drained:
            yield from _next_step(state, router, now)
    state.mark_leaving()
    yield from _send_slotless(state, now)


def _send_slotless(state: State, now: float) -> Iterator[Effect]:
    """Forward requests that take no slot, as soon as their model is loaded or no longer expected."""
    for request in tuple(state.slotless):
        model = state.requests[request].arrived.model
        if tables := state.open_for(model):
            state.forget(request)
            yield Forward(request=request, engine=tables[0].engine, slot=None, reason=Reason.SLOTLESS)
        elif not state.up_for(model) and state.back_by(now, model) is None:
            reason = state.requests[request].arrived.without_plan
            state.forget(request)
            engine = state.fallback(model)
            yield Forward(request=request, engine=engine, slot=None, reason=reason)


def due_at(state: State, now: float) -> float:
    """Return when a swap that is put off now can begin; infinite if there is none."""
    return min((_decides_at(state, router, now) for router in state.routers.values()), default=inf)


def _decides_at(state: State, router: Router, now: float) -> float:
    if router.busy or router.wanted is None:
        return inf
    times = [_patience_ends(state, router), *(_kept_until(state, router, at) for at in router.loaded)]
    return min((at for at in times if at > now), default=inf)


def _next_step(state: State, router: Router, now: float) -> Iterator[Effect]:
    if router.loading or router.unloading or router.lost_until is not None:
        return
    if router.leaving:
        _check_leaving(state, router)
    if not router.leaving:
        yield from _next_load(state, router, now)
    if router.leaving and all(_may_unload(state, engine, now) for engine in router.leaving):
        if router.chooses:
            yield from _load(router, now)
        else:
            router.unloads(now)
            yield from (UnloadModel(engine=engine) for engine in router.leaving)


def _check_leaving(state: State, router: Router) -> None:
    """Stop a swap whose clients have disconnected, and prepare models that others have loaded meanwhile."""
    wanted = _wanted(state, router)
    if wanted is None or (router.chooses and wanted != router.wanted):
        router.over()
    elif router.chooses and router.leaving != (rivals := router.rivals(wanted)):
        router.leaving = rivals
        state.mark_leaving()


def _next_load(state: State, router: Router, now: float) -> Iterator[Effect]:
    """Load the model that is wanted next, or choose the models that leave for it."""
    router.wanted = _wanted(state, router)
    if router.wanted is None:
        return
    if rivals := router.rivals(router.wanted):
        router.leaving = (_all_of if router.chooses else _victim)(state, router, rivals, now)
        state.mark_leaving()
    else:
        yield from _load(router, now)


def _load(router: Router, now: float) -> Iterator[Effect]:
    if router.wanted is not None:
        router.loads(router.wanted, now)
        yield LoadModel(engine=router.wanted, aside=router.leaving)


# -- the model to load, and the victim -------------------------------------------------------------------


def _waiting(state: State, router: Router) -> Iterator[tuple[EngineId, float]]:
    """Yield the models of this router that requests wait for, and since when, in queue order."""
    for request in state.waiting_requests():
        arrived = state.requests[request].arrived
        engine = router.engine_of(arrived.model)
        if engine is not None:
            yield engine, arrived.at


def _wanted(state: State, router: Router) -> EngineId | None:
    """Return the model to load next.

    A model for which another was unloaded goes first, if requests still wait.
    """
    waiting = [engine for engine, _ in _waiting(state, router) if router.is_(engine, ModelStatus.UNLOADED)]
    if router.wanted in waiting:
        return router.wanted
    return next(iter(waiting), None)


def _victim(state: State, router: Router, rivals: tuple[EngineId, ...], now: float) -> tuple[EngineId, ...]:
    """Return the model to unload, if one may go now: the least recently used, unrequested models first."""
    loaded = [engine for engine in rivals if router.is_(engine, *LOADED)]
    idle = _idle(state, router, loaded)
    gone = [engine for engine in idle if _kept_until(state, router, engine) <= now]
    if not gone and _patience_ends(state, router) <= now:
        gone = idle or loaded
    return tuple(sorted(gone, key=lambda engine: _used_at(state, engine))[:1])


def _all_of(state: State, router: Router, rivals: tuple[EngineId, ...], now: float) -> tuple[EngineId, ...]:
    """Return all of these models, if all of them may go now."""
    gone = [engine for engine in _idle(state, router, rivals) if _kept_until(state, router, engine) <= now]
    return rivals if len(gone) == len(rivals) or _patience_ends(state, router) <= now else ()


def _idle(state: State, router: Router, engines: Iterable[EngineId]) -> list[EngineId]:
    """Return those of these models on which nothing runs and that no request waits for."""
    asked = {engine for engine, _ in _waiting(state, router)}
    return [engine for engine in engines if engine not in asked and not _serving(state, engine)]


def _serving(state: State, engine: EngineId) -> bool:
    table = state.tables.get(engine)
    return table is not None and table.up and table.serving


def _used_at(state: State, engine: EngineId) -> float:
    """Return when a task last began or ended there. A sleeping model counts as the least recently used."""
    table = state.tables.get(engine)
    return table.active_at if table is not None and table.up else -inf


def _kept_until(state: State, router: Router, engine: EngineId) -> float:
    """Return until when to keep an idle model: for the time of a swap, but at most `swap_wait`."""
    return _used_at(state, engine) + min(router.swap_seconds, state.limits.swap_wait)


def _patience_ends(state: State, router: Router) -> float:
    """Return when the first request for the wanted model has waited long enough."""
    since = min((at for engine, at in _waiting(state, router) if engine == router.wanted), default=inf)
    return max(since, router.swapped_at) + state.limits.swap_wait


def _may_unload(state: State, engine: EngineId, now: float) -> bool:
    """Whether nothing runs there and all slots worth a file are saved.

    An unload would abort running tasks.
    """
    table = state.tables.get(engine)
    if table is None or not table.up:  # it sleeps, or is not known yet
        return True
    known = table.at_rest and not state.open_accounts(table)
    return known and not idle_work.left_at(state, table, now)


def _refused(state: State, router: Router, now: float) -> Iterator[Effect]:
    """Refuse requests for a model that failed to load recently."""
    for request in tuple(state.waiting_requests()) if router.failed else ():
        engine = router.engine_of(state.requests[request].arrived.model)
        if engine is not None and router.given_up(engine, now):
            state.forget(request)
            if router.is_(engine, ModelStatus.LOADED):  # it serves requests, but we cannot read its facts
                yield Forward(request=request, engine=engine, slot=None, reason=Reason.NOT_PROBED)
            else:
                yield Refuse(request=request, engine=engine)


def _passed_on(state: State, router: Router) -> Iterator[Effect]:
    """Forward requests for a model that is loaded, but not by a llama-server, unless it is about to leave."""
    foreign = [view.engine for view in router.models.values() if view.foreign]
    for request in tuple(state.waiting_requests()) if foreign else ():
        engine = router.engine_of(state.requests[request].arrived.model)
        if engine is not None and engine in foreign and engine not in router.leaving:
            state.forget(request)
            yield Forward(request=request, engine=engine, slot=None, reason=Reason.SLOTLESS)


# -- drained engines -------------------------------------------------------------------------------------


def drain_asked(state: State, event: DrainAsked) -> None:
    if event.drain:
        state.drained[event.engine] = False  # a repeated request is answered again
    else:
        state.drained.pop(event.engine, None)
    state.mark_leaving()


def engines_named(state: State, event: EnginesNamed) -> None:
    gone = set(state.engines) - set(event.engines)
    state.engines = event.engines
    for engine in gone:
        router = state.routers.pop(engine, None)
        for name in (engine, *(router.models if router else ())):
            table = state.tables.pop(name, None)
            state.drained.pop(name, None)
            if table:
                table.forget_left()
                state.freed += table.take_freed()
                _forget_prompts(state, table.model)
    state.mark_leaving()


def settle_drains(state: State, now: float) -> Iterator[Effect]:
    """Report each drained engine once, as soon as it is at rest."""
    for engine, reported in state.drained.items():
        if not reported and _at_rest(state, engine, now):
            state.drained[engine] = True
            yield Drained(engine=engine)


def _at_rest(state: State, engine: EngineId, now: float) -> bool:
    """Whether nothing runs there and all slots worth a file are saved; for a router, in all its models."""
    router = state.routers.get(engine)
    return all(_may_unload(state, name, now) for name in (engine, *(router.models if router else ())))
