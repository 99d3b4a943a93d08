"""`slotkeeper top`: slots, conversations and the hit rate of a running sidecar, live."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

from rich.console import Console, RenderableType
from rich.live import Live

from slotkeeper.asking import AdminClient, AskedError, admin_port
from slotkeeper.terminal.figures import span
from slotkeeper.terminal.out import complain
from slotkeeper.terminal.screen import ScreenState, screen

REQUESTS: Final = 10  # of the last ones; a terminal shows as many as it has lines for

Draw = Callable[[RenderableType], None]


async def top(
    out: Console,
    *,
    admin: str | None,
    token: str | None,
    every: float,
    once: bool,
    ca: Path | None = None,
) -> int:
    """Print what runs, again every `every` seconds, until it is interrupted. Returns the exit code.

    Without a terminal, one screen follows the other as plain text. A sidecar that goes away is waited for;
    one that was never there is a failure (1).
    """
    live = out.is_terminal and not out.is_dumb_terminal and not once
    try:
        async with interruptible(), admin_port(admin, token, ca=ca) as port:
            seen = await look(port, out)
            with _screen(out) if live else _paper(out) as draw:
                draw(_shown(seen, port, out))
                while not once:
                    await asyncio.sleep(every)
                    seen = await _again(port, out, draw, seen)
    except AskedError as error:
        complain("top", str(error))
        return 1
    return 0


async def look(port: AdminClient, out: Console) -> ScreenState:
    """Raises AskedError."""
    limit = max(REQUESTS, out.height) if out.is_terminal else REQUESTS
    state = await port.get("/api/state")
    listed = await port.get("/api/requests", limit=limit)
    return ScreenState(state=state, requests=listed["requests"], at=time.time())


async def _again(port: AdminClient, out: Console, draw: Draw, last: ScreenState) -> ScreenState:
    """Draws what is there now, or what was there last and why that is all."""
    try:
        seen = await look(port, out)
    except AskedError as error:
        draw(_shown(last, port, out, f"Seen {span(time.time() - last.at)} ago, trying again: {error}"))
        return last
    draw(_shown(seen, port, out))
    return seen


def _shown(seen: ScreenState, port: AdminClient, out: Console, trouble: str = "") -> RenderableType:
    return screen(seen, port.client.base_url.netloc.decode(), out.width, trouble)


# -- where it is drawn ---------------------------------------------------------------------------------


@contextmanager
def _screen(out: Console) -> Iterator[Draw]:
    """The whole terminal, given back as it was."""
    with Live(console=out, screen=True, auto_refresh=False) as live:
        yield lambda drawn: live.update(drawn, refresh=True)


@contextmanager
def _paper(out: Console) -> Iterator[Draw]:
    def draw(drawn: RenderableType) -> None:
        out.print(drawn)
        out.print()
        out.file.flush()

    yield draw


@asynccontextmanager
async def interruptible() -> AsyncIterator[None]:
    """Ctrl-C and SIGTERM end the block, and not the program."""
    loop = asyncio.get_running_loop()
    signals = signal.SIGINT, signal.SIGTERM
    try:
        async with asyncio.timeout(None) as block:

            def end() -> None:
                if not block.expired():
                    block.reschedule(loop.time())

            for number in signals:
                loop.add_signal_handler(number, end)
            yield
    except TimeoutError:
        if not block.expired():
            raise
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
