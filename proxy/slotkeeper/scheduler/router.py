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


LOADED: Final = (ModelStatus.LOADED, ModelStatus.SLEEPING)


@dataclass(slots=True)
class Router:
    """One router. At most `most` of its models are loaded at once; 0: no limit."""

    base: EngineId
    most: int = 0
    models: dict[EngineId, ModelView] = field(default_factory=dict)
    leaving: EngineId | None = None  # the victim: no new task begins there, and its slots are saved
    unloading: bool = False  # whether the router is unloading the victim
    wanted: EngineId | None = None  # the model that replaces the victim
    loading: EngineId | None = None  # the model that we have asked the router to load
    began: float | None = None  # when the current swap began, after the slots were saved
    swapped_at: float = -inf  # when a model was last loaded for us
    swap_seconds: float = 0.0  # duration of the last swap
    lost_until: float | None = None  # the router does not answer; it is expected back by then
    failed: dict[EngineId, float] = field(default_factory=dict)  # models not to load again before that time

    def __repr__(self) -> str:
        models = " ".join(f"{view.name}:{view.status}" for view in self.models.values())
        return f"<Router {self.base} | {models} | {self.leaving or '-'} -> {self.wanted or '-'}>"

    def listed(self, models: Iterable[ModelView], most: int) -> None:
        self.models = {view.engine: view for view in models}
        self.most, self.lost_until = most, None
        if self.leaving is not None and not self.is_(self.leaving, *LOADED):
            self.leaving, self.unloading = None, False
        for engine in [engine for engine in self.failed if engine not in self.models]:
            del self.failed[engine]

    def lost(self, until: float) -> None:
        """Record that the router does not answer: all its models count as unloaded."""
        unloaded = {e: replace(view, status=ModelStatus.UNLOADED) for e, view in self.models.items()}
        self.models, self.lost_until = unloaded, until
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
    def has_room(self) -> bool:
        """Whether one more model can be loaded without unloading another."""
        taken = sum(not self.is_(engine, ModelStatus.UNLOADED) for engine in self.models)
        return not self.most or taken < self.most

    @property
    def busy(self) -> bool:
        """Whether a swap of ours is under way."""
        return self.leaving is not None or self.loading is not None

    def unloads(self, now: float) -> None:
        self.unloading, self.began = True, now

    def loads(self, engine: EngineId, now: float) -> None:
        self.loading, self.began = engine, now if self.began is None else self.began

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
        if engine in {self.loading, self.leaving}:
            self.over()

    def over(self) -> None:
        """End the current swap."""
        self.leaving = self.loading = self.wanted = self.began = None
        self.unloading = False
