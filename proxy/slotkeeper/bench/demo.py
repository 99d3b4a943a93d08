"""`slotkeeper demo`: one session of two agents, sent to a stock engine directly and through the sidecar.

The agents share the system prompt and the tools and take turns to call tools; their client asks for a title
in between. At the end one user rewrites the last message. Each way has a fresh engine with the same flags, so
the sidecar makes the difference. Between the two tasks of each agent the engine is killed and restarted.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from slotkeeper.api.document import Doc
from slotkeeper.app import Sidecar
from slotkeeper.bench.lab import Restartable, keeping, ready, restartable, rested, stock_flags, url_of
from slotkeeper.bench.measure import Sample, Totals, notes, ratio, seconds, times_of, totals
from slotkeeper.bench.models import MissingExtraError, Tiny, build
from slotkeeper.bench.target import PLAIN, Counter, Script, Target, Turn, play
from slotkeeper.bench.texts import edited, prose, result, system, title
from slotkeeper.engine.child.launch import EngineBinary, NoEngineError, find_engine
from slotkeeper.engine.child.process import EngineDiedError

# -- the session ----------------------------------------------------------------------------------------

RULES: Final = """\
You are a careful programmer in a team. Read before you write, change as little as you can, and run the
tests before you say that something works. Say what you did in plain words. The team's handbook follows.

"""
TASKS: Final = {
    "A": ("The import fails on empty files. Find out why.", "Now write a test that would have caught it."),
    "B": ("Explain how names are looked up in this code.", "Which of these names could be made private?"),
}
REWRITTEN: Final = "Now write two tests that would have caught it, and keep them short."
SECOND_TASK: Final = "A2 call 1"  # the label of its first request
ROUNDS: Final = 3  # tool calls for each task


def tool(name: str, description: str, *arguments: str) -> Doc:
    # A closed set of values: the tiny models cannot end a free text.
    values = {"type": "string", "enum": ["reader.py", "names.py", "tests.py"]}
    properties = dict.fromkeys(arguments, values)
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


TOOLS: Final = [
    tool("read_file", "Give back the text of a file of the project.", "path"),
    tool("run_tests", "Run the tests of a file and give back what they print.", "path"),
    tool("find_names", "List the names that one file takes from another.", "path", "origin"),
]
# Only titles can be streamed: with tools and logprobs the engine refuses that. They are long, so that the
# sidecar's saves come while they run.
STREAMED: Final[dict[str, Any]] = {**PLAIN, "stream": True, "ignore_eos": True}
TITLE_TOKENS: Final = 64
CALL: Final[dict[str, Any]] = {"tools": TOOLS, "tool_choice": "required"}
ANSWER: Final[dict[str, Any]] = {"tools": TOOLS}


def agents(heads: Sequence[str] = ("", "")) -> Script:
    """Yield nineteen requests. `heads`: with which the system prompt begins, in each of the two tasks."""
    histories: dict[str, list[Doc]] = {name: [{}] for name in TASKS}
    for task, head in enumerate(heads):
        for history in histories.values():
            history[0] = system(head + RULES + prose(16000, 1))
        for name, history in histories.items():
            history.append({"role": "user", "content": f"{TASKS[name][task]}\n\n{prose(1500, 50 + task)}"})
        for number in range(ROUNDS):
            for name, history in histories.items():
                yield from _call(
                    history,
                    f"{name}{task + 1} call {number + 1}",
                    seed=ord(name) * 10 + task * ROUNDS + number,
                )
                if task == number == 0:
                    yield Turn(
                        label=f"title for {name}",
                        messages=title(history, head),
                        max_tokens=TITLE_TOKENS,
                        fields=STREAMED,
                    )
        for name, history in histories.items():
            answer = Turn(
                label=f"{name}{task + 1} answer", messages=tuple(history), max_tokens=200, fields=ANSWER
            )
            history.append((yield answer))
    # a request with the user's last message rewritten, and all messages after it dropped
    history = histories["A"]
    last = max(at for at, message in enumerate(history) if message["role"] == "user")
    messages = edited(history[: last + 1], last, REWRITTEN)
    yield Turn(label="A2 rewritten", messages=messages, max_tokens=200, fields=ANSWER)


def _call(history: list[Doc], label: str, seed: int) -> Script:
    reply = yield Turn(label=label, messages=tuple(history), max_tokens=300, fields=CALL)
    history += [reply, result(reply, prose(2500, seed))]


# -- the two ways ----------------------------------------------------------------------------------------

CONTEXT_TOKENS: Final = 32768  # of each slot
DIRECT: Final = "stock, directly"
THROUGH: Final = "through Slotkeeper"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoScene:
    """One engine, and the sidecar in front of it, if any."""

    engine: Restartable
    sidecar: Sidecar | None

    @property
    def base(self) -> str:
        return url_of(self.sidecar) if self.sidecar else self.engine.base

    async def before(self, turn: Turn, counter: Counter) -> None:
        """Before the second task: read the engine's counter, then kill the engine and start it again."""
        if turn.label != SECOND_TASK:
            return
        if self.sidecar:
            await rested(self.sidecar)
        await counter.read()
        await self.engine.restart()
        if self.sidecar:
            await ready(self.sidecar)


Rows = Mapping[str, Callable[[Totals], str]]

ROWS: Final[Rows] = {
    "requests": lambda found: f"{found.requests:,}",
    "prompt tokens": lambda found: f"{found.prompt:,}",
    "  reused": lambda found: f"{found.sums.reused:,}",
    "  computed, while a client waited": lambda found: f"{found.computed:,}",
    "idle: computed in pauses": lambda found: f"{found.sums.idle:,}",
    "oracle: the least possible": lambda found: f"{found.oracle:,}",
    "waited / oracle": lambda found: ratio(found.sums.waited),
    "total / oracle (prefill amplification)": lambda found: ratio(found.total),
    "waited seconds: sum of times to first token": lambda found: seconds(found.waits.waited_seconds),
    "  the least possible, at the engine's own speed": lambda found: seconds(found.least_seconds),
    "time to first token, median": lambda found: seconds(found.waits.first_token_p50),
    "time to first token, 95th percentile": lambda found: seconds(found.waits.first_token_p95),
    "longest stall of an answer (titles)": lambda found: seconds(found.waits.stall_seconds),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoStage:
    """The engine, the model and the folder for the demo."""

    binary: EngineBinary
    model: Path
    folder: Path

    @asynccontextmanager
    async def open(self, way: str) -> AsyncIterator[DemoScene]:
        """Start a fresh engine, with a sidecar unless `way` is DIRECT."""
        slots = self.folder / ("direct" if way == DIRECT else "through")
        slots.mkdir()
        flags = stock_flags(self.binary, self.model, slots, context_tokens=CONTEXT_TOKENS)
        async with restartable(self.binary, flags, self.folder / f"{way}.log") as engine:
            if way == DIRECT:
                yield DemoScene(engine=engine, sidecar=None)
            else:
                async with keeping(engine) as sidecar:
                    yield DemoScene(engine=engine, sidecar=sidecar)


async def demo(*, engine: str | None, model: str) -> int:
    """Run both ways and print the comparison. Returns the exit code."""
    console = Console()
    try:
        tiny = Tiny(model)
    except ValueError:
        console.print(f"There is no tiny model {model}; there are {', '.join(Tiny)}.")
        return 2
    try:
        with tempfile.TemporaryDirectory(prefix="slotkeeper-demo-") as folder:
            stage = DemoStage(binary=find_engine(engine), model=build(tiny), folder=Path(folder))
            _introduce(console, stage)
            found = await _both(stage, console)
    except (NoEngineError, MissingExtraError, EngineDiedError) as error:
        console.print(str(error), style="red", markup=False)
        return 1
    return _report(console, found)


def _introduce(console: Console, stage: DemoStage) -> None:
    console.print(
        f"Two agents with one system prompt, and a title request for each, on {stage.model.stem} and "
        f"llama-server {stage.binary.kind}, stock flags, two slots. After their first task the engine is "
        "killed and started again.",
        highlight=False,
    )


async def _both(stage: DemoStage, console: Console) -> dict[str, list[Sample]]:
    requests = _length()
    columns = (TextColumn("{task.description:<20}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    found: dict[str, list[Sample]] = {}
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        for way in (DIRECT, THROUGH):
            task = progress.add_task(way, total=requests)
            async with stage.open(way) as scene, Target(scene.base, (scene.engine.base,)) as target:
                found[way] = await _played(scene, target, way, _step(progress, task))
    return found


async def _played(scene: DemoScene, target: Target, way: str, step: Callable[[Sample], None]) -> list[Sample]:
    async def before(turn: Turn) -> None:
        await scene.before(turn, target.counter)

    return await play(agents(), target, session=way, seen=step, before=before)


def _step(progress: Progress, task: TaskID) -> Callable[[Sample], None]:
    return lambda _: progress.advance(task)


def _length() -> int:
    """Count the requests of the session; it does not depend on the answers."""
    script = agents()
    next(script)
    count = 1
    while True:
        try:
            script.send({"role": "assistant", "content": ""})
        except StopIteration:
            return count
        count += 1


def _report(console: Console, samples: dict[str, list[Sample]]) -> int:
    times = times_of(samples[DIRECT])
    direct, through = (totals(samples[way], times) for way in (DIRECT, THROUGH))
    table = Table("", DIRECT, THROUGH, box=None, pad_edge=False, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, figure in ROWS.items():
        table.add_row(name, figure(direct), figure(through))
    console.print(table)
    troubled = list(notes(samples))
    for note in troubled:
        console.print(note, highlight=False)
    if not troubled:
        console.print(_sentence(direct, through), highlight=False)
    return int(bool(troubled))


def _sentence(direct: Totals, through: Totals) -> str:
    """Return the result in one sentence, over all tokens that the engines computed, idle time included."""
    spent_directly = direct.sums.engine
    saved = spent_directly - through.sums.engine
    if saved <= 0:
        return "Slotkeeper saved nothing here: the engine's own cache did as well."
    return (
        f"Slotkeeper saved {saved:,} of {spent_directly:,} prompt tokens ({saved / spent_directly:.0%}): "
        f"the engine computed {ratio(through.total)} times what a perfect cache would, "
        f"instead of {ratio(direct.total)}."
    )
