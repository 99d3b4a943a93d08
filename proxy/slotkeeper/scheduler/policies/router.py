"""The state of one router, which loads and unloads models, and the progress of our own swap there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf
from typing import Final

from slotkeeper.scheduler.types import EngineId, ModelName

RETRY_SECONDS: Final = 30.0  # after a failed load: each try unloads another model


class ModelStatus(StrEnum):
    """The status of one model in its router."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    SLEEPING = "sleeping"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """One model in its router's listing (engine.md 13)."""

    engine: EngineId
    name: ModelName
    status: ModelStatus
    foreign: bool = False  # it is loaded, but not by a llama-server: it has no slots for us


LOADED: Final = (ModelStatus.LOADED, ModelStatus.SLEEPING)


@dataclass(slots=True)
class Router:
    """One router. At most `most` of its models are loaded at once; 0: no limit.

    If it `chooses` (llama-swap), its configuration says which models leave for another, and only a load shows
    them. So all of them are prepared for a load that was not seen yet, and afterwards only those that left.
    """

    base: EngineId
    most: int = 0
    models: dict[EngineId, ModelView] = field(default_factory=dict)
    chooses: bool = False
    leaving: tuple[EngineId, ...] = ()  # the victims: no new task begins there, and their slots are saved
    unloading: bool = False  # whether the router is unloading the victim
    wanted: EngineId | None = None  # the model that replaces the victim
    loading: EngineId | None = None  # the model that we have asked the router to load
    began: float | None = None  # when the current swap began, after the slots were saved
    swapped_at: float = -inf  # when a model was last loaded for us
    swap_seconds: float = 0.0  # duration of the last swap
    lost_until: float | None = None  # the router does not answer; it is expected back by then
    failed: dict[EngineId, float] = field(default_factory=dict)  # models not to load again before that time
    beside: tuple[EngineId, ...] = ()  # models that were loaded when the present load began
    stays: dict[tuple[EngineId, EngineId], bool] = field(default_factory=dict)  # (loaded, other) -> as seen

    def __repr__(self) -> str:
        models = " ".join(f"{view.name}:{view.status}" for view in self.models.values())
        leaving = ",".join(self.leaving)
        return f"<Router {self.base} | {models} | {leaving or '-'} -> {self.wanted or '-'}>"

    def listed(self, models: Iterable[ModelView], most: int, *, chooses: bool = False) -> None:
        self.models = {view.engine: view for view in models}
        self.most, self.lost_until, self.chooses = most, None, chooses
        if not chooses and not any(self.is_(engine, *LOADED) for engine in self.leaving):
            self.leaving, self.unloading = (), False
        listed = self.models.keys()  # of the others, nothing is remembered
        self.failed = {engine: until for engine, until in self.failed.items() if engine in listed}
        self.stays = {pair: stayed for pair, stayed in self.stays.items() if listed >= set(pair)}
        self._learn()

    def _learn(self) -> None:
        """Record which models have stayed beside the one that was just loaded.

        A model that once left counts as leaving: to save it in vain costs less than to lose its states.
        """
        if self.loading is None or not self.is_(self.loading, *LOADED):
            return
        for other in self.beside:
            stayed = not self.is_(other, ModelStatus.UNLOADED)
            self.stays[self.loading, other] = stayed and self.stays.get((self.loading, other), True)
        self.beside = ()

    def lost(self, until: float) -> None:
        """Record that the router does not answer: all its models count as unloaded."""
        unloaded = {e: replace(view, status=ModelStatus.UNLOADED) for e, view in self.models.items()}
        self.models, self.lost_until = unloaded, until
        self.failed.clear()  # no model is loaded there now, so a try costs none its place
        self.over()

    def serves(self, now: float) -> float | None:
        """Return until when requests for its models may wait; None if it is not expected back."""
        if self.lost_until is None:
            return inf
        return self.lost_until if self.lost_until > now else None

    def is_(self, engine: EngineId, *states: ModelStatus) -> bool:
        view = self.models.get(engine)
        return view is not None and view.status in states

    def engine_of(self, model: ModelName) -> EngineId | None:
        """Return the engine of the model with this name; None if the router has no such model."""
        return next((view.engine for view in self.models.values() if view.name == model), None)

    @property
    def loaded(self) -> list[EngineId]:
        """The models that can be unloaded, now or soon."""
        return [engine for engine in self.models if self.is_(engine, *LOADED)]

    @property
    def taken(self) -> tuple[EngineId, ...]:
        """The models that take room: they are loaded, or about to be."""
        return tuple(engine for engine in self.models if not self.is_(engine, ModelStatus.UNLOADED))

    def rivals(self, wanted: EngineId) -> tuple[EngineId, ...]:
        """Return the models of which the load of this one unloads at least one, as far as we know."""
        if self.chooses:
            return tuple(engine for engine in self.taken if not self.stays.get((wanted, engine), False))
        return self.taken if self.most and len(self.taken) >= self.most else ()

    @property
    def busy(self) -> bool:
        """Whether a swap of ours is under way."""
        return bool(self.leaving) or self.loading is not None

    def unloads(self, now: float) -> None:
        self.unloading, self.began = True, now

    def loads(self, engine: EngineId, now: float) -> None:
        self.loading, self.began = engine, now if self.began is None else self.began
        self.beside = self.taken if self.chooses else ()

    def given_up(self, engine: EngineId, now: float) -> bool:
        """Whether a load of this model failed less than RETRY_SECONDS ago."""
        return self.failed.get(engine, -inf) > now

    def came_up(self, engine: EngineId, now: float) -> None:
        """Record that a model is loaded and its slots are known."""
        self.failed.pop(engine, None)
        if engine == self.loading:
            self.swapped_at, self.swap_seconds = now, now - (now if self.began is None else self.began)
            self.over()

    def swap_failed(self, engine: EngineId, now: float, *, broken: bool) -> None:
        """Record that a swap failed. `broken`: the next try would fail too, so the model has to wait."""
        if broken:
            self.failed[engine] = now + RETRY_SECONDS
        if engine in {self.loading, *self.leaving}:
            self.over()

    def over(self) -> None:
        """End the current swap."""
        self.loading = self.wanted = self.began = None
        self.unloading, self.leaving, self.beside = False, (), ()
