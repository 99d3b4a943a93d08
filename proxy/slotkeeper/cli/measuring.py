"""`slotkeeper doctor --measure`: how fast the user's own engine is, measured in a slot that holds nothing.

The same text is made longer piece by piece, so that no piece computes anything twice, whatever the model's
memory can do. Saving a slot and restoring the file at once changes nothing in it.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from slotkeeper.api.answers.answer import UBATCH_TOKENS, Prefilled, PrefillTimes, prefill_times
from slotkeeper.bench.texts import prose
from slotkeeper.cli.terminal import size
from slotkeeper.engine.answers import EngineError
from slotkeeper.engine.client import EngineClient
from slotkeeper.engine.file_canary import removed, swept, temporary
from slotkeeper.engine.traits import Reading
from slotkeeper.scheduler.rates import LinearTimes
from slotkeeper.scheduler.types import SlotId, Tier
from slotkeeper.store.folders.snapshot_folder import SnapshotFolder
from slotkeeper.store.trouble import StoreError

WARM_UP: Final = 8  # tokens of the first prefill, which is slower than all others
PIECES: Final = (32, 1, 128, 512, 1, 32, 512, 128, 1, 512, 32, 512, 1, 128)  # tokens
SAVED_AFTER: Final = 512  # tokens of a piece after which the slot is saved and restored
ANSWER_TOKENS: Final = 24
ENOUGH: Final = 8  # prefills after which a slow engine is not kept longer
MOST_SECONDS: Final = 90.0  # of computing
CHARACTERS: Final = 6  # of text for each token, more than any tokenizer needs
TEXTS: Final = 10_000
MIB: Final = 2**20


class NotMeasuredError(Exception):
    """The engine cannot be measured now; the message says why, and what to do."""


@dataclass(slots=True)
class Speeds:
    """What was measured on one engine."""

    prefills: list[Prefilled] = field(default_factory=list)
    answer: float = 0.0  # seconds of each token of an answer
    depth: int = 0  # tokens in front of that answer
    saves: list[tuple[int, float]] = field(default_factory=list)  # bytes and seconds
    restores: list[tuple[int, float]] = field(default_factory=list)

    @property
    def times(self) -> PrefillTimes | None:
        return prefill_times(self.prefills)

    def rates(self, reading: Reading) -> dict[str, Any]:
        """Return what was measured in the terms of the simulator's `EngineRates`."""
        found: dict[str, Any] = {}
        if times := self.times:
            step = max(self.answer - self.depth * times.depth_seconds, self.answer / 2)
            found |= {
                "prefill": UBATCH_TOKENS / times.seconds(UBATCH_TOKENS, 0),
                "decode": 1 / step,
                "deeper": times.depth_seconds,
            }
        if self.saves:
            save, restore = _fitted(self.saves), _fitted(self.restores)
            found |= {
                "save": 1 / save.each,
                "restore": 1 / restore.each,
                "file_seconds": (save.constant + restore.constant) / 2,
            }
        if reading.traits.token_bytes:
            sizes = ("token_bytes", "checkpoint_bytes")
            found |= {name: getattr(reading.traits, name) for name in sizes}
        return found


def _fitted(files: list[tuple[int, float]]) -> LinearTimes:
    fitted = LinearTimes(1e9, least=1, call_seconds=0.0)
    for count, seconds in files:
        fitted.took(count, max(seconds, 1e-6))
    fitted.each = max(fitted.each, 1e-12)
    return fitted


async def measure(client: EngineClient, reading: Reading, folder: Path | None, shown: Console) -> Speeds:
    """Measure an engine that is up. Takes engine time, up to a few minutes on a slow one.

    Args:
        client: of that engine.
        reading: its traits.
        folder: its --slot-save-path as this machine sees it, to measure files too; None: no files.
        shown: where progress is shown.

    Raises:
        NotMeasuredError: a request runs, or arrives meanwhile, or no slot is empty.
        EngineError, EngineGoneError: the engine refuses, or does not answer any more.
    """
    slot = await _empty_slot(client)
    pieces = _pieces(reading.traits.n_ctx)
    text = prose(CHARACTERS * (WARM_UP + sum(pieces)), secrets.randbelow(TEXTS))
    ids = await client.tokenize(text, add_special=False, parse_special=False)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    run = _Run(client, slot, ids, folder)
    with Progress(*columns, console=shown, transient=True) as progress:
        task = progress.add_task("prefill", total=len(pieces) + 1)
        try:
            await run.piece(WARM_UP)
            run.speeds.prefills.clear()
            for piece in pieces:
                await run.piece(piece)
                if piece == SAVED_AFTER:
                    progress.update(task, description="save and restore" if run.folder else "prefill")
                    await run.files(reading)
                progress.update(task, description="prefill")
                progress.advance(task)
                if run.enough:
                    break
            progress.update(task, description="answer")
            await run.answer()
        finally:
            await run.leave()
    return run.speeds


async def _empty_slot(client: EngineClient) -> SlotId:
    views = await client.slots()
    if any(view.busy for view in views):
        raise NotMeasuredError("A request runs on this engine: measure it when it is idle.")
    empty = [view.slot for view in views if not view.held]
    if not empty:
        raise NotMeasuredError(
            "Each slot holds a conversation, and measuring would overwrite one: measure right after the "
            "engine's start."
        )
    return empty[-1]


def _pieces(context_tokens: int) -> tuple[int, ...]:
    """Return the pieces that fit into half of a slot."""
    found, left = [], context_tokens // 2 - WARM_UP
    for piece in PIECES:
        if piece <= left:
            found.append(piece)
            left -= piece
    return tuple(found)


@dataclass(slots=True)
class _Run:
    client: EngineClient
    slot: SlotId
    ids: list[int]
    folder: Path | None
    held: int = 0  # tokens in the slot
    reaches: int = 0  # the most that it may hold: the last call may have been given up
    began: float = field(default_factory=time.monotonic)
    speeds: Speeds = field(default_factory=Speeds)

    @property
    def enough(self) -> bool:
        return len(self.speeds.prefills) >= ENOUGH and time.monotonic() - self.began > MOST_SECONDS

    async def piece(self, tokens: int) -> None:
        """Make the text in the slot longer by these tokens."""
        await self._alone()
        self.reaches = self.held + tokens
        found = await self.client.prefill(self.ids[: self.held + tokens], self.slot)
        self.held = found.held
        if found.computed:
            self.speeds.prefills.append(
                Prefilled(tokens=found.computed, context=found.cached, seconds=found.seconds)
            )

    async def files(self, reading: Reading) -> None:
        """Save the slot, and restore it from that file; nothing if there is no folder, or no room in it."""
        traits, folder = reading.traits, self.folder
        if folder is None:
            return
        most = self.held * traits.token_bytes + (1 + len(self.speeds.prefills)) * traits.checkpoint_bytes
        try:
            await asyncio.to_thread(SnapshotFolder(folder, Tier.HOT).demand, most)
        except StoreError:
            self.folder = None
            return
        await self._alone()
        name = temporary()
        try:
            saved = await self.client.save(self.slot, name)
            restored = await self.client.restore(self.slot, name)
        finally:
            await asyncio.to_thread(removed, folder / name)
        self.speeds.saves.append((saved.written, saved.seconds))
        self.speeds.restores.append((restored.read, restored.seconds))

    async def answer(self) -> None:
        await self._alone()
        self.speeds.depth = self.held
        self.reaches = self.held + 1 + ANSWER_TOKENS
        found = await self.client.timed_answer(self.ids[: self.held + 1], self.slot, ANSWER_TOKENS)
        self.speeds.answer, self.held = found.token_seconds, found.held

    async def leave(self) -> None:
        """Erase the slot, if the engine can erase slots and no request has taken it."""
        with suppress(EngineError):
            for view in await self.client.slots():
                if view.slot == self.slot and view.held and self.held <= view.held <= self.reaches:
                    await swept(self.client, self.slot, view.held, None)

    async def _alone(self) -> None:
        """Raise NotMeasuredError if a request has arrived, which our next step would disturb."""
        if any(view.busy for view in await self.client.slots()):
            raise NotMeasuredError("A request has arrived on this engine: measure it when it is idle.")


# -- what is shown ---------------------------------------------------------------------------------------


def profile(reading: Reading, speeds: Speeds) -> dict[str, Any]:
    """Return the engine for the simulator: `python -m benchmarks.profiles --profile FILE`."""
    name = reading.model_path.stem if reading.model_path else str(reading.model.get("id", "engine"))
    return {
        "name": name,
        "build": reading.build,
        "memory": reading.traits.memory.value,
        "window": reading.traits.n_swa,
        "rates": speeds.rates(reading),
    }


def printed(*, as_json: bool) -> Callable[[Reading, Speeds], None]:
    """Return what shows the result: the profile as one line of JSON, or a table."""

    def show(reading: Reading, speeds: Speeds) -> None:
        if as_json:
            sys.stdout.write(orjson.dumps(profile(reading, speeds)).decode() + "\n")
        else:
            Console().print(table(reading, speeds))

    return show


def table(reading: Reading, speeds: Speeds) -> Table:
    """Return the speeds as people read them."""
    shown = Table(title="How fast this engine is", show_header=False, title_justify="left")
    for name, value in _lines(reading, speeds):
        shown.add_row(name, value)
    return shown


def _lines(reading: Reading, speeds: Speeds) -> Iterator[tuple[str, str]]:
    times, traits = speeds.times, reading.traits
    if times:
        deepest = speeds.depth
        yield "a pass, whatever few tokens", f"{1000 * times.pass_seconds:.1f} ms"
        for depth in (0, deepest):
            rate = UBATCH_TOKENS / times.seconds(UBATCH_TOKENS, depth)
            where = f"behind {depth:,} tokens" if depth else "at the beginning"
            yield f"prefill of {UBATCH_TOKENS} tokens {where}", f"{rate:,.0f} tokens/s"
    else:
        yield "prefill", "too few prefills fit into a slot"
    yield f"answer behind {speeds.depth:,} tokens", f"{1 / speeds.answer:,.1f} tokens/s"
    for name, files in (("save", speeds.saves), ("restore", speeds.restores)):
        if files:
            fitted = _fitted(files)
            took = f"{1000 * fitted.constant:.1f} ms + {1 / fitted.each / MIB:,.0f} MiB/s"
            yield f"{name} of {files[-1][0] / MIB:,.1f} MiB", f"{files[-1][1]:.3f} s ({took})"
    if not speeds.saves:
        yield "save and restore", "not measured: give the engine's --slot-save-path with --slot-dir"
    if traits.token_bytes:
        yield "state of a token", size(traits.token_bytes)
    if traits.checkpoint_bytes:
        yield "a checkpoint", size(traits.checkpoint_bytes)
