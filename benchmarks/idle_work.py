"""Whether idle work delays clients: requests at random moments after an answer, also while idle work runs.

`python -m benchmarks.idle_work [--builds b10434 ...] [--model tiny-hybrid] [--episodes 4] [--seed 1]`. Three
lanes, each an engine and a sidecar: with idle work, without it (`idle_tokens` = 0), and without it once more.
The difference between the last two is the noise of the machine. Each episode is played in one lane after the
other while the others rest: the same requests after the same pauses (`benchmarks.episodes`). Differences are
given in batches: the time that the engine takes for 2048 tokens here. The difference of the time to the first
token includes all noise of the machine. The difference of the time before the engine began with the request
has little noise, but does not show batches that are shared with idle work. A turn that arrives while its own
beginning is computed waits for that and reuses it: only the time to the first token shows that.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

import httpx
from rich.progress import Progress
from rich.table import Table

from benchmarks.episodes import Episode, Heard, Kind
from benchmarks.figures import BUILDS, console, keep
from benchmarks.ways import Scene, Way, opened
from slotkeeper.api.answers.answer import percentile
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.target import PATIENT
from slotkeeper.observe.log import configure

BATCH_TOKENS: Final = 2048  # llama-server's -b
TARGET: Final = 1.0  # batches that a request may wait for idle work
COMPARED: Final = (Kind.TOOL, Kind.TASK, Kind.OTHER)
ON, OFF, AGAIN = "idle work", "none", "none again"
LANES: Final[Mapping[str, Mapping[str, Any]]] = {ON: {}, OFF: {"idle_tokens": 0}, AGAIN: {"idle_tokens": 0}}
CAUSES: Final = {"idle work": ON, "the machine itself": AGAIN}  # causes of a difference to the lane `OFF`
PARTS: Final[Mapping[str, Callable[[Heard], float]]] = {
    "whole": lambda one: one.seconds,
    "waited": lambda one: one.waited,
}
SHOWN: Final = ("p50", "p90", "max")
Lanes = Mapping[str, Sequence[Heard | None]]
Row = dict[str, Any]


async def lanes(build: str, model: Tiny, episodes: int, seed: int) -> tuple[Lanes, int]:
    """Return the answers of each lane, in the same order in all, and the tokens of idle work in the first."""
    heard: dict[str, list[Heard | None]] = {name: [] for name in LANES}
    order = random.Random(seed)
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=PATIENT))
        scenes: dict[str, Scene] = {}
        for name, settings in LANES.items():
            scenes[name] = await stack.enter_async_context(opened(Way.UP, build, model, **settings))
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task(f"{build} {model}", total=episodes * len(LANES))
            for number in range(episodes):
                for name in order.sample(list(LANES), len(LANES)):
                    rng = random.Random(f"{seed} {number}")
                    scene = scenes[name]
                    episode = Episode(base=scene.base, http=http, number=number, rng=rng)
                    heard[name] += await episode.play()
                    if scene.sidecar:
                        await lab.rested(scene.sidecar)
                    progress.advance(task)
        return heard, scenes[ON].spent().idle


def batch_seconds(heard: Lanes) -> float:
    """Return the engine's time for one batch, from all requests of more than one batch."""
    long = (one for one in _answered(heard[OFF]) if one.computed > BATCH_TOKENS)
    return BATCH_TOKENS / statistics.median(one.computed / one.prefill_seconds for one in long)


def pairs(ones: Sequence[Heard | None], others: Sequence[Heard | None]) -> list[tuple[Heard, Heard]]:
    """Return the requests that can be compared. After a reply that differs, the prompts differ too."""
    both = zip(ones, others, strict=True)
    return [(one, other) for one, other in both if one and other and one.prompt == other.prompt]


def differences(compared: Sequence[tuple[Heard, Heard]], batch: float) -> Row:
    """Return how much later the first token came, in batches, for each kind of request and for all."""
    kinds = {kind.value: [pair for pair in compared if pair[0].kind is kind] for kind in COMPARED}
    kinds["all"] = [pair for pair in compared if pair[0].kind in COMPARED]
    return {
        kind: {"requests": len(some)}
        | {
            part: _distribution([(seconds(one) - seconds(other)) / batch for one, other in some])
            for part, seconds in PARTS.items()
        }
        for kind, some in kinds.items()
        if some
    }


def _distribution(values: Sequence[float]) -> dict[str, float]:
    found = {name: percentile(values, at) or 0.0 for name, at in (("p50", 50), ("p90", 90), ("max", 100))}
    return {name: round(value, 3) for name, value in found.items()}


async def measure(build: str, model: Tiny, episodes: int, seed: int) -> Row:
    heard, idle = await lanes(build, model, episodes, seed)
    batch = batch_seconds(heard)
    compared = {cause: pairs(heard[lane], heard[OFF]) for cause, lane in CAUSES.items()}
    return {
        "build": build,
        "model": model.value,
        "batch_ms": round(1000 * batch, 1),
        "idle_tokens": idle,
        "left_out": {cause: len(heard[OFF]) - len(found) for cause, found in compared.items()},
        "later": {cause: differences(found, batch) for cause, found in compared.items()},
        "lanes": {
            name: {kind.value: _usual(kind, ones) for kind in COMPARED} for name, ones in heard.items()
        },
    }


def _answered(ones: Sequence[Heard | None]) -> list[Heard]:
    return [one for one in ones if one]


def _usual(kind: Kind, ones: Sequence[Heard | None]) -> dict[str, float]:
    """Return medians of the time to first token, and of the tokens computed before it."""
    found = [one for one in _answered(ones) if one.kind is kind]
    return {
        "first_token_ms": round(1000 * statistics.median(one.seconds for one in found), 1),
        "computed": statistics.median(one.computed for one in found),
    }


def _worst(kinds: Mapping[str, Any]) -> dict[str, float]:
    """Return the longest wait of the other client, and the largest delay of the conversation's own turns."""
    own = [found["whole"]["max"] for kind, found in kinds.items() if kind in {Kind.TOOL, Kind.TASK}]
    return {"another client waited": kinds[Kind.OTHER]["waited"]["max"], "own turn, in all": max(own)}


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="how much later the first token came than without idle work, in batches")
    for name in ("build", "because of", "request"):
        shown.add_column(name, no_wrap=True)
    for name in ("requests", *SHOWN, *(f"waited\n{name}" for name in SHOWN)):
        shown.add_column(name, justify="right")
    for row in rows:
        for cause, kinds in row["later"].items():
            for kind, found in kinds.items():
                figures = (f"{found[part][name]:.2f}" for part in PARTS for name in SHOWN)
                cells = (row["build"], cause, kind, str(found["requests"]), *figures)
                shown.add_row(*cells, end_section=kind == "all")
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.idle_work", description=__doc__)
    parser.add_argument("--builds", nargs="+", default=list(BUILDS))
    parser.add_argument("--model", type=Tiny, default=Tiny.HYBRID)
    parser.add_argument(
        "--episodes", type=int, default=4, help="episodes in each lane, of eleven requests and more"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--name", default="idle_work", help="name of the file of figures, for a part of the table"
    )
    chosen = parser.parse_args(arguments)
    configure("error", "console")
    rows = [
        asyncio.run(measure(build, chosen.model, chosen.episodes, chosen.seed)) for build in chosen.builds
    ]
    console.print(table(rows))
    for row in rows:
        worst = {cause: _worst(kinds) for cause, kinds in row["later"].items()}
        console.print(f"{row['build']}: a batch takes {row['batch_ms']} ms", highlight=False)
        console.print(f"most in batches, target {TARGET} beside the machine: {worst}", highlight=False)
        for name, usual in row["lanes"].items():
            console.print(f"{name}: {usual}", highlight=False)
        if not row["idle_tokens"]:
            console.print("[red]no idle work was done: this run shows nothing[/red]")
    keep(chosen.name, {"target": TARGET, "rows": rows})
    return int(any(not row["idle_tokens"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
