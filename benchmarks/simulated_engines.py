"""The scheduler in front of simulated engines: a fast and a slow one, compared with static splits.

`python -m benchmarks.simulated_engines`. Time to the first token, in the time of the simulation, so that no
other work on the machine disturbs it. An engine computes prompts one after the other, in the order of
arrival, and answers at its own rate. It has only slots: no RAM cache, no files. Each agent waits for its
answer, thinks, and asks again. A few warm-up agents show the engines' speeds first. A split gives the fast
engine a fixed number of agents, at least half.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from statistics import fmean, quantiles
from typing import Any, Final

from rich.table import Table

from benchmarks.figures import console, keep
from slotkeeper.scheduler.costs import Limits
from slotkeeper.scheduler.effects import Forward, Observe, SetTimer
from slotkeeper.scheduler.engine_model import EngineTraits, Memory
from slotkeeper.scheduler.events import (
    Arrived,
    EngineUp,
    Event,
    Finished,
    Observed,
    Rendered,
    ReplyKnown,
    Started,
    TimerFired,
)
from slotkeeper.scheduler.placement import Placement
from slotkeeper.scheduler.tokens import EMPTY, Tokens
from slotkeeper.scheduler.types import ClientId, EngineId, RequestId, SlotId, SlotView

SYSTEM: Final = Tokens(range(1500))  # the same for all conversations
ASKED: Final = (1500, 375, 150, 750)  # tokens of questions, in turn
REPLY: Final = 24
PREFILL: Final = 3000.0  # tokens per second, of the fast engine
DECODE: Final = 60.0
LOOK: Final = 1e-4  # seconds that GET /slots takes
SHOWING: Final = 4  # warm-up agents, and their turns
LONGEST: Final = 2000  # tokens of the longest text
P95: Final = 94  # index among the 99 cut points of `quantiles`

Act = Callable[[float], None]


@dataclass
class PaperEngine:
    """A simulated engine: its rates in tokens per second, and the contents of its slots."""

    prefill: float
    decode: float
    slots: list[Tokens]
    busy: list[RequestId | None] = field(init=False)
    until: float = 0.0  # when all its prompts are computed

    def __post_init__(self) -> None:
        self.busy = [None] * len(self.slots)

    @classmethod
    def slower(cls, times: float, slots: int) -> PaperEngine:
        return cls(PREFILL / times, DECODE / times, [EMPTY] * slots)


class Simulation:
    """One sidecar with its engines."""

    def __init__(self, engines: Sequence[PaperEngine], texts: Iterator[int]) -> None:
        self.engines = {EngineId(f"e{number}"): engine for number, engine in enumerate(engines)}
        self.due: list[tuple[float, int, Act]] = []
        self._placement = Placement(*self.engines, limits=Limits(pause=1e6, idle_tokens=0))
        self._texts = texts
        self._numbers = count()
        self._prompts: dict[RequestId, Tokens] = {}
        self._answered: dict[RequestId, Callable[[float, float, Tokens], None]] = {}
        for name, engine in self.engines.items():
            traits = EngineTraits(n_slots=len(engine.slots), memory=Memory.DENSE, ram_cache=False)
            self._post(EngineUp(at=0.0, engine=name, traits=traits))

    def text(self, tokens: int) -> Tokens:
        """Return a text that was never sent before."""
        begin = next(self._texts) * LONGEST
        return Tokens(range(begin, begin + tokens))

    def at(self, when: float, act: Act) -> None:
        heapq.heappush(self.due, (when, next(self._numbers), act))

    def step(self) -> None:
        when, _, act = heapq.heappop(self.due)
        act(when)

    @property
    def serving(self) -> bool:
        return bool(self._answered)

    def ask(self, now: float, prompt: Tokens, answered: Callable[[float, float, Tokens], None]) -> None:
        """Send a request.

        `answered` gets the time of its first token, its end, and the slot's contents then.
        """
        request = RequestId(f"r{next(self._numbers)}")
        self._prompts[request], self._answered[request] = prompt, answered
        self._post(Arrived(at=now, request=request, client=ClientId(request)))
        self._post(Rendered(at=now, request=request, prompt=prompt))

    def _post(self, event: Event) -> None:
        for effect in self._placement.on(event):
            match effect:
                case Observe():
                    self.at(event.at + effect.delay + LOOK, partial(self._look, effect.engine))
                case SetTimer():
                    self.at(event.at + effect.delay, lambda now: self._post(TimerFired(at=now)))
                case Forward():
                    self._begin(effect, event.at)

    def _look(self, name: EngineId, now: float) -> None:
        engine = self.engines[name]
        views = tuple(
            SlotView(slot=SlotId(n), busy=owner is not None, task=n, held=len(engine.slots[n]) or None)
            for n, owner in enumerate(engine.busy)
        )
        self._post(Observed(at=now, asked=now - LOOK / 2, engine=name, slots=views))

    def _begin(self, sent: Forward, now: float) -> None:
        engine, request = self.engines[sent.engine], sent.request
        prompt, slot = (
            self._prompts.pop(request),
            sent.slot if sent.slot is not None else engine.busy.index(None),
        )
        cached = min(engine.slots[slot].lcp(prompt), len(prompt) - 1)
        engine.busy[slot] = request
        prefill = (len(prompt) - cached) / engine.prefill
        first = engine.until = max(now, engine.until) + prefill

        def over(end: float) -> None:
            engine.busy[slot] = None
            engine.slots[slot] = held = prompt + self.text(REPLY - 1)
            figures = {"prompt_tokens": len(prompt), "cached": cached, "generated": REPLY}
            self._answered.pop(request)(first, end, held)
            self._post(Finished(at=end, request=request, slot=slot, prefill_seconds=prefill, **figures))
            self._post(ReplyKnown(at=end, request=request, tokens=held))

        self.at(now + LOOK, lambda when: self._post(Started(at=when, request=request)))
        self.at(first + REPLY / engine.decode, over)


@dataclass(frozen=True, slots=True)
class Work:
    agents: int
    turns: int
    think: float  # seconds between an answer and the next question


def worked(
    sidecars: Sequence[Simulation],
    front: Callable[[int], int],
    work: Work,
    at: float,
) -> tuple[list[float], float]:
    """Run agents at the sidecars that `front` gives.

    Return each wait for a first token, in seconds, and the time at which the next agents may begin.
    """
    waits: list[float] = []

    def agent(sidecar: Simulation) -> None:
        held, turn = SYSTEM, 0

        def asks(now: float) -> None:
            nonlocal turn
            prompt = held + sidecar.text(ASKED[turn % len(ASKED)])
            turn += 1

            def answered(first: float, end: float, left: Tokens) -> None:
                nonlocal held
                waits.append(first - now)
                held = left
                if turn < work.turns:
                    sidecar.at(end + work.think, asks)

            sidecar.ask(now, prompt, answered)

        sidecar.at(at, asks)

    for number in range(work.agents):
        agent(sidecars[front(number)])
    now = at
    while len(waits) < work.agents * work.turns or any(sidecar.serving for sidecar in sidecars):
        soonest = min((one for one in sidecars if one.due), key=lambda one: one.due[0][0])
        now = soonest.due[0][0]
        soonest.step()
    return waits, now + work.think


def way(slower: float, fast: int | None, work: Work, slots: int = 2) -> list[float]:
    """Return each wait for a first token, in seconds.

    `fast`: number of agents at the fast engine, None for one sidecar over both.
    """
    engines, texts = [PaperEngine.slower(1, slots), PaperEngine.slower(slower, slots)], count(1)
    fronts = [engines] if fast is None else [[engine] for engine in engines]
    sidecars = [Simulation(front, texts) for front in fronts]
    shown = Work(SHOWING, SHOWING, work.think)
    _, now = worked(sidecars, lambda number: number % len(sidecars), shown, at=1.0)
    at_fast = work.agents if fast is None else fast
    waits, _ = worked(sidecars, lambda number: int(number >= at_fast), work, at=now)
    return waits


def p95(waits: Sequence[float]) -> float:
    return quantiles(waits, n=100)[P95]


def compared(slower: float, agents: int, *, turns: int = 6, think: float = 0.2) -> dict[str, Any]:
    """Compare one sidecar with the best of the static splits, each by its own measure."""
    work = Work(agents, turns, think)
    ours = way(slower, None, work)
    splits = [way(slower, fast, work) for fast in range(agents // 2, agents + 1)]
    return {
        "slower": slower,
        **asdict(work),
        "p95": p95(ours),
        "p95_ratio": p95(ours) / min(map(p95, splits)),
        "mean_ratio": fmean(ours) / min(map(fmean, splits)),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulated_engines", description=__doc__)
    parser.add_argument("--slower", nargs="+", type=float, default=[2, 3, 6])
    parser.add_argument("--agents", nargs="+", type=int, default=[4, 8, 12])
    parser.add_argument("--think", nargs="+", type=float, default=[0.2, 2])
    chosen = parser.parse_args(arguments)
    shown = Table(title="time to the first token, beside the best static split (simulated)")
    for name in ("one is slower", "agents", "think, s", "p95, s", "of the best split", "mean, of the best"):
        shown.add_column(name, justify="right")
    rows = [
        compared(slower, agents, think=think)
        for slower in chosen.slower
        for agents in chosen.agents
        for think in chosen.think
    ]
    for row in rows:
        ratios = (f"{row[name]:.2f}" for name in ("p95", "p95_ratio", "mean_ratio"))
        shown.add_row(f"{row['slower']:g} x", str(row["agents"]), f"{row['think']:g}", *ratios)
    console.print(shown)
    keep("simulated_engines", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
