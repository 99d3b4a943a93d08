"""Where an engine answers: a server of its own, or one model of a router (llama-server without a model).

A router finds the model in the body of a POST and in the query of a GET, and would load any that is named,
evicting another. So every call of ours says `autoload=false` (engine.md 11).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self
from urllib.parse import quote

from slotkeeper.scheduler.types import NO_ROUTER, EngineId, ModelName

NO_AUTOLOAD: Final = "autoload=false"
_MARK: Final = "#"  # no base URL has a fragment


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """A base URL, and which model is meant there."""

    base: str
    model: ModelName = NO_ROUTER

    @classmethod
    def of(cls, engine: str) -> Self:
        base, _, model = engine.partition(_MARK)
        return cls(base.rstrip("/"), ModelName(model))

    @property
    def engine(self) -> EngineId:
        return EngineId(f"{self.base}{_MARK}{self.model}" if self.model else self.base)

    def url(self, method: str, path: str) -> str:
        """Of a control call."""
        if not self.model:
            return self.base + path
        named = f"model={quote(self.model, safe='')}&" if method == "GET" else ""
        return f"{self.base}{path}{'&' if '?' in path else '?'}{named}{NO_AUTOLOAD}"

    def body(self, method: str, body: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Of a control call, with the model that it is for."""
        if not self.model or method == "GET":
            return body
        return {**(body or {}), "model": self.model}

    def passed_on(self, target: str, *, held: bool) -> str:
        """Path and query with which a client's request goes on; `held`: its model is loaded, as we know."""
        if not self.model or not held:
            return target
        return f"{target}{'&' if '?' in target else '?'}{NO_AUTOLOAD}"
