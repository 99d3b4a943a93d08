"""Ways to an engine on a tiny model, and the tokens that a sidecar on one of them has computed itself."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.target import Turn
from slotkeeper.engine.child.launch import CONTEXT_TOKENS


class Way(StrEnum):
    STOCK = "stock"  # the engine alone, with stock flags
    UP = "up"  # through a sidecar with a slot folder; the engine has the flags of `slotkeeper up`
    RESTED = "up-rested"  # the same, with all idle work done before each turn
    FOLDER = "folder"  # as `up`, but with stock flags


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A fresh engine, and the sidecar in front of it if there is one."""

    way: Way
    engine: lab.Restartable
    sidecar: Sidecar | None

    @property
    def base(self) -> str:
        return lab.url_of(self.sidecar) if self.sidecar else self.engine.base

    async def before(self, _: Turn) -> None:
        await self.pause()

    async def pause(self) -> None:
        """Let all idle work finish, if this way has pauses."""
        if self.sidecar and self.way is Way.RESTED:
            await lab.rested(self.sidecar)

    def spent(self) -> lab.Spent:
        return lab.spent(self.sidecar)


@asynccontextmanager
async def opened(
    way: Way,
    build: str,
    model: Tiny,
    *args: str,
    context_tokens: int = CONTEXT_TOKENS,
    **settings: Any,
) -> AsyncIterator[Scene]:
    """Run an engine with two slots of this many tokens; `args` are its flags, `settings` the sidecar's."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slotkeeper-bench-")))
        recipe = lab.up_flags if way in {Way.UP, Way.RESTED} else lab.stock_flags
        engine = await stack.enter_async_context(
            lab.tiny_engine(model, build, folder, *args, context_tokens=context_tokens, recipe=recipe)
        )
        ours: dict[str, Any] = {"slot_dir": engine.flags.slot_save_path}
        if way is Way.RESTED:  # it saves as soon as possible, or each pause would take seconds
            ours["save_pause"] = lab.PAUSE_SECONDS
        front = lab.in_front_of(engine.base, engine.flags, **(ours | settings))
        sidecar = None if way is Way.STOCK else await stack.enter_async_context(front)
        yield Scene(way=way, engine=engine, sidecar=sidecar)
