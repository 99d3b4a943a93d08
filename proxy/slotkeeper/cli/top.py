"""`slotkeeper top`: slots, conversations and the hit rate of a running sidecar, live."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from slotkeeper import system
from slotkeeper.cli.admin_client import AdminClient, AskedError, admin_port
from slotkeeper.cli.terminal import (
    UNKNOWN,
    Column,
    Row,
    activity,
    bar,
    conversation_name,
    fitted,
    one_line,
    percent,
    ratio,
    requests,
    seconds,
    short,
    shortened,
    size,
    span,
    sparkline,
    tokens,
)
from slotkeeper.observe.standard_error import complain
from slotkeeper.observe.states import EngineState, Service
from slotkeeper.scheduler.requests.figures import hit_rate

Document = dict[str, Any]

HISTORY: Final = 1800.0  # seconds of history that the admin port keeps
SLOW: Final = 3  # slowest requests that are shown
SPARKS: Final = 60  # cells of the sparkline, if the terminal has room
BAR: Final = 16
NARROW_BAR: Final = 8
WIDE: Final = 72  # columns of a terminal on which bars are long
NARROW: Final = 20  # cells of the sparkline's label
COLOURS_OF_STATES: Final = {  # all others are red
    EngineState.UNLOADED: "dim",
    **dict.fromkeys((EngineState.SLEEPING, EngineState.PROBING, EngineState.LOADING), "yellow"),
    **dict.fromkeys((EngineState.AWAITED, EngineState.DRAINING, EngineState.DRAINED), "bold yellow"),
    **dict.fromkeys((EngineState.SILENT, EngineState.NO_SLOTS), "bold yellow"),
}
COLOURS: Final = {"idle": "dim", "running": "green", "launched": "green", "tended": "cyan"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenState:
    """The answers of a sidecar that one screen shows."""

    state: Document  # the document of /api/state
    requests: Sequence[Document]  # summaries of requests, the newest first
    at: float  # seconds since the epoch
    lines: int | None = None  # requests in the list; None: all


def screen(seen: ScreenState, where: str, width: int, trouble: str = "") -> Group:
    """Return the screen, at most `width` cells wide. `trouble`: why the answers are out of date."""
    state = seen.state
    parts: list[RenderableType] = [headline(state, where)]
    if trouble:
        parts.append(Text(trouble, "bold red"))
    parts += alarms(state)
    parts += [totals(state, width), *unknown(state), history(state["history"], seen.at, width)]
    parts += waits(state["waits"])
    for engine in state["engines"]:
        parts += [Text(), *slots(engine, width)]
    if state["running"]:
        parts += [Text(), running(state["running"], width, seen.at)]
    if late := slowest(seen.requests):
        parts += [Text(), fitted(SLOWEST, [_named(row, width, seen.at) for row in late], width)]
    if state["clients"]:
        parts += [Text(), fitted(CLIENTS, state["clients"], width)]
    tiers = [_drawn(tier, width) for tier in state["tiers"] if tier["budget_bytes"] or tier["snapshots"]]
    if tiers:
        parts += [Text(), fitted(TIERS, tiers, width)]
        parts += [Text(tier["advice"], "yellow") for tier in tiers if tier["advice"]]
    return Group(*parts, Text(), *_requests(seen, width))


def headline(state: Document, where: str) -> Text:
    text = Text.assemble(
        (f"slotkeeper {state['version']}", "bold"), f" at {where}, up {span(state['uptime_seconds'])}"
    )
    return text.append(", draining", "bold yellow") if state["draining"] else text


QUIET_STATES: Final = frozenset(
    {EngineState.UP, EngineState.UNLOADED, EngineState.DRAINING, EngineState.DRAINED}
)


def alarms(state: Document) -> Iterator[Text]:
    """Yield a line for each engine that users should know about, and what happens to requests."""
    for engine in state["engines"]:
        if engine["state"] in QUIET_STATES:
            continue
        since = engine["down_seconds"]
        text = f"{engine['engine']} {engine['state_text']}" + (
            f", for {span(since)}" if since is not None else ""
        )
        yield Text(text, COLOURS_OF_STATES.get(engine["state"], "bold red"))
    service = state["service"]
    if service["text"]:
        yield Text(service["text"], "bold red" if service["state"] == Service.FAILS else "bold yellow")


def totals(state: Document, width: int) -> Table:
    engines = state["engines"]
    up = sum(engine["up"] for engine in engines)
    sums = state["totals"] | {"queue": state["queued"], "up": f"{up} of {len(engines)}"}
    return fitted(TOTALS, [sums], width)


def unknown(state: Document) -> Iterator[Text]:
    """Yield for how many requests the oracle is unknown, and why: what is unknown is not perfect."""
    if text := state["totals"]["unknown_text"]:
        yield Text(text, "yellow")


def history(buckets: Iterable[Document], now: float, width: int) -> Text:
    """Return the hit rate of the last half hour as a sparkline; a dot for times without requests."""
    cells = min(SPARKS, max(width - NARROW, 1))
    reused, prompts = [0] * cells, [0] * cells
    for bucket in buckets:
        ago = min(max(now - bucket["at"], 0.0), HISTORY)
        cell = cells - 1 - min(int(ago / HISTORY * cells), cells - 1)
        reused[cell] += bucket["reused"]
        prompts[cell] += bucket["prompt_tokens"]
    shares = [hit_rate(part, whole) for part, whole in zip(reused, prompts, strict=True)]
    return Text.assemble("hit rate, 30 min  ", (sparkline(shares), "green"))


def waits(found: Document) -> Iterator[Text]:
    """Yield how long the last requests waited for their first tokens, and the longest stall of an answer."""
    if found["answers"]:
        first = f"{seconds(found['first_token_p50'])}, p95 {seconds(found['first_token_p95'])}"
        stall = (
            f", longest stall {seconds(found['stall_seconds'])}" if found["stall_seconds"] is not None else ""
        )
        yield Text(f"first token p50 {first}{stall}, of the last {found['answers']:,} answers")


# -- slots, requests and tiers ---------------------------------------------------------------------------


def slots(engine: Document, width: int) -> Iterator[RenderableType]:
    speed = engine["prefill_tokens_per_second"]
    facts = [engine["build"], engine["memory"], f"{tokens(round(speed))} tokens/s" if speed else ""]
    facts += [f"{label} {value}" for label, value in engine["labels"].items()]
    name = Text.assemble((engine["engine"], "bold"), *(f", {word}" for word in facts if word))
    if engine["state"] != EngineState.UP:
        name.append(
            f", {engine['state'].replace('_', ' ')}", COLOURS_OF_STATES.get(engine["state"], "bold red")
        )
    yield name
    if not engine["up"]:
        return
    context = engine["context_tokens"]
    rows = [
        slot
        | {
            "context_tokens": context,
            "bar": bar(slot["held_tokens"], context or 0, _bar_cells(width)),
            "shown_name": shortened(conversation_name(slot), width),
        }
        for slot in engine["slots"]
    ]
    if rows:
        yield fitted(SLOTS, rows, width)


def running(rows: Sequence[Row], width: int, now: float) -> Table:
    """Return the table of unfinished requests and their progress."""
    drawn = [_named(row, width, now) | {"bar": _progress(row["now"]["percent"], width)} for row in rows]
    return fitted(RUNNING, drawn, width)


def _progress(share: int | None, width: int) -> str:
    return bar(share, 100, _bar_cells(width)) if share else ""


def slowest(rows: Sequence[Row]) -> list[Row]:
    """Return the requests that waited, or still wait, longest for their first token."""
    timed = [row for row in rows if row["to_first_token_seconds"]]
    return sorted(timed, key=lambda row: -row["to_first_token_seconds"])[:SLOW]


def _named(row: Row, width: int, now: float) -> Row:
    return row | {"shown_name": shortened(conversation_name(row, now), width)}


def _drawn(tier: Row, width: int) -> Row:
    budget = tier["budget_bytes"]
    return tier | {"bar": bar(tier["bytes"], budget, _bar_cells(width)) if budget else ""}


def _bar_cells(width: int) -> int:
    return BAR if width >= WIDE else NARROW_BAR


def _requests(seen: ScreenState, width: int) -> Iterator[RenderableType]:
    if seen.requests:
        yield requests(seen.requests[: seen.lines], width, seen.at)
        return
    yield Text("No request has come yet.", "dim")
    if port := seen.state["data_port"]:
        base = f"{port['scheme']}://{port['address']}"
        yield Text(f"Point a client at {base}/v1, or at {base} if it adds /v1 itself.")


def colour(slot: Row) -> str:
    """Return the colour of a slot's state. Yellow: no request of ours explains the state."""
    return COLOURS.get(slot["state"], "yellow")


def _first_token(row: Row) -> str:
    """Return the time to the first token; "so far" if there is none yet."""
    waits = row["first_token_seconds"] is None
    return seconds(row["to_first_token_seconds"]) + (" so far" if waits else "")


def _room(tier: Row) -> str:
    budget = tier["budget_bytes"]
    return size(tier["bytes"]) + (f" of {size(budget)}" if budget is not None else "")


def _saved(sums: Row) -> str:
    """Return the time saved; "unknown" if there were requests, but it is known for none of them."""
    return "unknown" if sums["requests"] and sums["saved_seconds"] is None else seconds(sums["saved_seconds"])


TOTALS: Final = (  # for both ratios, 1.00 is a perfect cache
    Column("waited", lambda sums: ratio(sums["waited"])),
    Column("total", lambda sums: ratio(sums["total"])),
    Column("hit rate", lambda sums: percent(sums["reused"], sums["prompt_tokens"])),
    Column("time saved", _saved),
    Column("reused", lambda sums: tokens(sums["reused"]), keep=1),
    Column("computed", lambda sums: tokens(sums["computed"]), keep=1),
    Column("idle", lambda sums: tokens(sums["idle"]), keep=1),
    Column("requests", lambda sums: tokens(sums["requests"]), keep=2),
    Column("queue", lambda sums: tokens(sums["queue"]), keep=3),
    Column("engines", lambda sums: sums["up"]),
)
SLOTS: Final = (
    Column("slot", lambda slot: str(slot["slot"])),
    Column("state", lambda slot: slot["state"], right=False, style=colour),
    Column("full", lambda slot: slot["bar"], keep=3, right=False, style="cyan"),
    Column("", lambda slot: percent(slot["held_tokens"], slot["context_tokens"] or 0), keep=7),
    Column("tokens", lambda slot: tokens(slot["held_tokens"])),
    Column("holds", lambda slot: slot["shown_name"], keep=6, right=False),
    Column("idle", lambda slot: span(slot["idle_seconds"]), keep=5),
    Column("checkpoints", lambda slot: str(len(slot["checkpoints"])), keep=2),
    Column("in a file", lambda slot: "yes" if slot["saved"] else UNKNOWN, keep=1),
    Column("last request", lambda slot: slot["request"] or UNKNOWN, keep=0, right=False, style="dim"),
)
CLIENTS: Final = (
    Column("client", lambda client: one_line(client["agent"]), right=False),
    Column("key", lambda client: one_line(client["key"]), keep=0, right=False, style="dim"),
    Column("requests", lambda client: tokens(client["requests"]), keep=2),
    Column("prompt", lambda client: tokens(client["prompt_tokens"]), keep=3),
    Column("reused", lambda client: tokens(client["reused"]), keep=4),
    Column("computed", lambda client: tokens(client["computed"])),
    Column("saved", _saved, keep=5),
    Column("last", lambda client: f"{span(client['idle_seconds'])} ago", keep=1, right=False),
)
RUNNING: Final = (
    Column("running", lambda row: short(row["id"]), right=False),
    Column("conversation", lambda row: row["shown_name"], keep=5, right=False),
    Column("model", lambda row: one_line(row["model"] or UNKNOWN), keep=0, right=False),
    Column("slot", lambda row: UNKNOWN if row["slot"] is None else str(row["slot"]), keep=3),
    Column("for", lambda row: seconds(row["seconds"]), keep=2),
    Column("", lambda row: row["bar"], keep=1, right=False, style="cyan"),
    Column("stages", lambda row: row["stages_text"], keep=4, right=False, style="dim"),
    Column("now", lambda row: activity(row["now"]), right=False),
)
SLOWEST: Final = (
    Column("slowest", lambda row: short(row["id"]), right=False),
    Column("conversation", lambda row: row["shown_name"], keep=5, right=False),
    Column("first token", _first_token),
    Column("stages", lambda row: row["stages_text"], right=False),
)
TIERS: Final = (
    Column("files", lambda tier: tier["tier"], right=False),
    Column("full", lambda tier: tier["bar"], keep=1, right=False, style="cyan"),
    Column("snapshots", lambda tier: str(tier["snapshots"])),
    Column("bytes", _room, right=False),
)


# -- the command -----------------------------------------------------------------------------------------

REQUESTS: Final = 10  # in the list; a terminal shows as many as it has lines
LATEST: Final = 100  # among which the slowest are found, as on the page

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
    """Show the sidecar's state again every `every` seconds, until interrupted. Returns the exit code.

    Without a terminal, screens follow each other as plain text. If the sidecar goes away later, the command
    waits for it; if there is none at the start, it fails with code 1.
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
    """Ask the sidecar for its state. Raises AskedError."""
    limit = max(REQUESTS, out.height) if out.is_terminal else REQUESTS
    state = await port.get("/api/state")
    listed = await port.get("/api/requests", limit=max(limit, LATEST))
    return ScreenState(state=state, requests=listed["requests"], at=time.time(), lines=limit)


async def _again(port: AdminClient, out: Console, draw: Draw, last: ScreenState) -> ScreenState:
    """Draw the current state; if it cannot be had, draw the last one and why."""
    try:
        seen = await look(port, out)
    except AskedError as error:
        draw(_shown(last, port, out, f"Seen {span(time.time() - last.at)} ago, trying again: {error}"))
        return last
    draw(_shown(seen, port, out))
    return seen


def _shown(seen: ScreenState, port: AdminClient, out: Console, trouble: str = "") -> RenderableType:
    return screen(seen, port.client.base_url.netloc.decode(), out.width, trouble)


# -- terminal or plain text ------------------------------------------------------------------------------


@contextmanager
def _screen(out: Console) -> Iterator[Draw]:
    """Draw on the whole terminal, and restore it afterwards."""
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
    """End the block, not the program, at Ctrl-C or SIGTERM."""
    loop = asyncio.get_running_loop()
    undo: list[Callable[[], None]] = []
    try:
        async with asyncio.timeout(None) as block:

            def end() -> None:
                if not block.expired():
                    block.reschedule(loop.time())

            undo += [system.on_signal(loop, number, end) for number in system.ENDS]
            yield
    except TimeoutError:
        if not block.expired():
            raise
    finally:
        for restore in undo:
            restore()
