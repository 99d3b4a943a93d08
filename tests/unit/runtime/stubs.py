"""A line to an engine that does not exist: it says what it is told to say, and remembers what was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slotkeeper.core.observed import SlotView
from slotkeeper.core.tokens import Tokens
from slotkeeper.core.traits import EngineTraits, Memory
from slotkeeper.core.types import EngineId, SlotId
from slotkeeper.engine.client import EngineError, EngineGoneError, Health, PrefillResult

ENGINE = EngineId("http://engine")
TRAITS = EngineTraits(n_slots=2, n_ctx=4096, memory=Memory.DENSE, eager_thinning=False)
END_OF_TURN = 9


@dataclass
class StubClient:
    """Slots that are as the test says, and prefills that wait for the test or fail."""

    views: list[SlotView]
    looks: int = 0
    prefills: list[tuple[list[int], SlotId]] = field(default_factory=list)
    hold: asyncio.Event | None = None  # a prefill waits for it
    refuse: Exception | None = None
    closed: bool = False
    cancelled: int = 0

    async def slots(self, **_: Any) -> tuple[SlotView, ...]:
        self.looks += 1
        if isinstance(self.refuse, EngineGoneError | EngineError):
            raise self.refuse
        return tuple(self.views)

    async def prefill(self, ids: Sequence[int], slot: SlotId, **_: Any) -> PrefillResult:
        self.prefills.append((list(ids), slot))
        try:
            if self.hold:
                await self.hold.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.refuse:
            raise self.refuse
        return PrefillResult(computed=len(ids), cached=0, held=len(ids), slot=slot)

    async def close(self) -> None:
        self.closed = True


class StubLink:
    """What the driver and the renderer need of an EngineLink. Its words are the ids of their letters."""

    def __init__(self, engine: EngineId = ENGINE, traits: EngineTraits = TRAITS) -> None:
        self.engine = engine
        self.traits = traits
        self.health = Health.OK
        self.ready = True
        self.fresh = True
        self.auth: dict[str, str] = {}
        self.end_of_turn = END_OF_TURN
        self.kicks = 0
        self.rendered: list[Any] = []  # chats that were to be rendered
        self.says: Tokens | Exception = Tokens()  # what rendering the next chat gives
        self.client = StubClient([SlotView(slot=SlotId(n), busy=False) for n in range(traits.n_slots)])

    def kick(self) -> None:
        self.kicks += 1

    async def watch(self, on_up: Any, on_lost: Any) -> None:
        on_up(self)
        await asyncio.Event().wait()
        on_lost(self)

    async def render_chat(self, chat: Any, auth: Any) -> Tokens:
        self.rendered.append((chat, auth))
        if isinstance(self.says, Exception):
            raise self.says
        return self.says

    async def render_prompt(self, prompt: Any) -> Tokens:
        return Tokens(prompt) if isinstance(prompt, list) else await self.render_text(prompt)

    async def render_text(self, text: str) -> Tokens:
        return Tokens(map(ord, text))
