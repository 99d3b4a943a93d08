"""A stub of the link to an engine, and helpers for a driver in front of it.

The link answers what a test sets, and records the requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from patience import PATIENCE
from slotkeeper.api.head import Api
from slotkeeper.api.request import UNNAMED, Ask
from slotkeeper.engine.answers import EngineError, EngineGoneError, Health, MediaPrompt, PrefillResult
from slotkeeper.engine.client import EngineAddress, EngineClient
from slotkeeper.runtime.driver import Driver
from slotkeeper.runtime.link import EngineLink
from slotkeeper.scheduler.effects import Forward
from slotkeeper.scheduler.events import Arrived, Finished, Rendered, Started
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import EngineTraits, Memory
from slotkeeper.scheduler.types import ClientId, EngineId, RequestId, SlotId, SlotView

ENGINE = EngineId("http://engine")
TRAITS = EngineTraits(n_slots=2, n_ctx=4096, memory=Memory.DENSE, eager_thinning=False)
END_OF_TURN = 9
PROMPT = Tokens(range(1, 400))


@dataclass
class StubClient(EngineClient):
    """Slots as the test sets them, and prefills that wait for the test or fail."""

    views: list[SlotView]
    looks: int = 0
    prefills: list[tuple[list[int], SlotId]] = field(default_factory=list)
    hold: asyncio.Event | None = None  # a prefill waits for it
    first_batch: int = 0  # tokens of a prefill that are computed at once
    refuse: Exception | None = None
    closed: bool = False
    cancelled: int = 0

    @property
    def busy(self) -> bool:
        return False

    async def slots(self, **_: Any) -> tuple[SlotView, ...]:
        self.looks += 1
        if isinstance(self.refuse, EngineGoneError | EngineError):
            raise self.refuse
        return tuple(self.views)

    async def prefill(
        self,
        ids: Sequence[int] | MediaPrompt,
        slot: SlotId,
        *,
        progress: Callable[[int, int], object] | None = None,
        **_: Any,
    ) -> PrefillResult:
        assert not isinstance(ids, MediaPrompt)
        self.prefills.append((list(ids), slot))
        if progress:
            progress(self.first_batch, 0)
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


class StubLink(EngineLink):
    """A link that is up from the start. The tokens of a text are the codes of its letters."""

    client: StubClient

    def __init__(self, engine: EngineId = ENGINE, traits: EngineTraits = TRAITS) -> None:
        super().__init__(engine, address=EngineAddress.of(engine), api_key=None)
        self.client = StubClient([SlotView(slot=SlotId(n), busy=False) for n in range(traits.n_slots)])
        self.traits = traits
        self.health = Health.OK
        self.up = self.fresh = True
        self.tokenizer = object()  # type: ignore[assignment]  # never asked
        self.end_of_turn = END_OF_TURN
        self.kicks = 0
        self.rendered: list[Any] = []  # chats that were to be rendered
        self.says: Tokens | Exception = Tokens()  # the result of rendering the next chat

    async def was_lost(self, losses: int) -> bool:
        """Whether the engine was lost since then. Nothing watches this link, so it returns at once."""
        return self.losses != losses

    def kick(self) -> None:
        self.kicks += 1

    async def watch(self, on_up: Any, on_lost: Any, on_router: Any = None) -> None:
        on_up(self)
        await asyncio.Event().wait()
        on_lost(self)

    async def render_chat(self, chat: Any, auth: Any) -> Tokens:
        self.rendered.append((chat, auth))
        if isinstance(self.says, Exception):
            raise self.says
        return self.says

    async def render_prompt(self, prompt: Any, auth: Any) -> Tokens:
        return Tokens(prompt) if isinstance(prompt, list) else await self.render_text(prompt, auth)

    async def render_text(self, text: str, auth: Any) -> Tokens:
        return Tokens(map(ord, text))


def asked(**given: Any) -> Ask:
    """Return a chat request that is not streamed; `given` are other fields."""
    known: dict[str, Any] = {"chat": None, "prompt": None, "media": False, "hash_chain": ()}
    known |= {"stream": False, "claim": UNNAMED, "cache_prompt": True, "progress": False}
    return Ask(**{"api": Api.CHAT} | known | given)


# -- driving a driver -----------------------------------------------------------------------------------


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def granted(grant: asyncio.Future[Forward]) -> Forward:
    async with asyncio.timeout(PATIENCE):
        return await grant


def arrival(name: str, **more) -> Arrived:
    return Arrived(at=Driver.now(), request=RequestId(name), client=ClientId("c"), **more)


def admit(driver: Driver, name: str, prompt: Tokens = PROMPT, **more) -> asyncio.Future[Forward]:
    """Ask for a place. The engine begins the request at once."""
    grant = driver.admit(arrival(name, **more))

    def begins(granted: asyncio.Future[Forward]) -> None:
        if not granted.cancelled():
            driver.post(Started(at=driver.now(), request=RequestId(name)))

    grant.add_done_callback(begins)
    driver.post(Rendered(at=driver.now(), request=RequestId(name), prompt=prompt))
    return grant


def finish(driver: Driver, name: str, prompt: Tokens = PROMPT, cached: int = 0) -> None:
    """End a task as an engine does; the slot then holds the prompt and one token of the reply."""
    for link in driver.links.values():
        table = driver.placement.tables.get(link.engine)
        for slot, owner in enumerate(table.owners if table else ()):
            if owner == RequestId(name) and isinstance(link.client, StubClient):
                link.client.views[slot] = replace(link.client.views[slot], held=len(prompt) + 1)
    figures: dict[str, Any] = {"prompt_tokens": len(prompt), "cached": cached, "generated": 2}
    driver.post(Finished(at=driver.now(), request=RequestId(name), **figures))


def fallbacks(driver: Driver, reason: str) -> float:
    return driver.metrics.registry.get_sample_value("slotkeeper_fallbacks_total", {"reason": reason}) or 0.0
