"""A laboratory for snapshots: engines that die and restart, scripted talks, and a check of every restore.

The expected replies of a talk come from an engine alone, without a sidecar and without files.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

from chaos.conftest import ready, settings
from chaos.raw import until
from engine.conftest import stock
from patience import PATIENCE
from slotkeeper.app import Sidecar, running
from slotkeeper.bench.texts import prose
from slotkeeper.engine.answers import RestoreResult
from slotkeeper.engine.child.launch import find_engine, free_port
from slotkeeper.engine.child.process import EngineProcess
from slotkeeper.engine.flags import EngineFlags
from slotkeeper.runtime.sharing import WRITERS
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.rates import Measured, Rates
from slotkeeper.scheduler.slots.engine_model import SlotContents, SnapshotId
from slotkeeper.scheduler.types import EngineId
from slotkeeper.store.index import Kept
from slotkeeper.store.intake import SavedFile

CHAT: Final = "/v1/chat/completions"
SMALL: Final = ("-c", "8192")  # tokens of both slots: enough for a talk, and quick to start
MARGIN: Final = 0.02  # logprob
SOON: Final = 0.05  # seconds without a request until a slot is saved
PREFILL: Final = 10_000.0  # tokens per second, about that of a tiny model on a quiet machine
PREFETCHED: Final = 1_000_000  # tokens per hour, as by default
Reply = dict[str, Any]


@dataclass(slots=True)
class Bench:
    """One engine that is killed and started again at the same address, on the same folder."""

    model: str
    build: str
    folder: Path
    args: Sequence[str] = ()
    port: int = field(default_factory=free_port)
    process: EngineProcess | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)

    @property
    def slots(self) -> Path:
        return self.folder / "slots"

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def words(self) -> tuple[str, ...]:
        return (*stock(self.model, self.folder, self.port), *SMALL, *self.args)

    @property
    def flags(self) -> dict[EngineId, EngineFlags]:
        return {EngineId(self.base): EngineFlags.parse(self.words)}

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def start(self) -> None:
        log = self.folder / "engine.log"
        self.process = EngineProcess(find_engine(self.build), self.words, base=self.base, log=log)
        self.process.start()
        await self.process.wait_ready()

    async def restart(self) -> None:
        self.kill()
        await self.start()

    def kill(self) -> None:
        if self.process:
            self.process.kill()


@asynccontextmanager
async def bench(model: str, build: str, folder: Path, *args: str) -> AsyncIterator[Bench]:
    made = Bench(model, build, folder, args)
    try:
        await made.start()
        yield made
    finally:
        made.kill()


@dataclass(slots=True)
class Talk:
    """A conversation whose replies are fixed."""

    number: int
    replies: list[Reply] = field(default_factory=list)
    lead: int = 1500  # characters of the system prompt; the first turn has 1800 with it
    turn: int = 0  # number of turns that were sent
    begins: Tokens = field(default_factory=Tokens)  # its first prompt

    def owns(self, state: Kept | SlotContents) -> bool:
        """Whether a snapshot belongs to this talk: a park may save one during a turn of another talk."""
        return state.tokens.lcp(self.begins) == min(len(state.tokens), len(self.begins))

    def body(self, turn: int) -> Reply:
        """Return the request of one turn, with the replies before it."""
        messages = [
            {"role": "system", "content": f"This is talk {self.number}. {prose(self.lead, self.number)}"}
        ]
        for at in range(turn + 1):
            length = 300 if at else max(300, 1800 - self.lead)
            question = f"Question {at}. {prose(length, 100 + 10 * self.number + at)}"
            messages += [{"role": "user", "content": question}, *self.replies[at : at + (at < turn)]]
        plain = {"chat_template_kwargs": {"plain": True}, "temperature": 0, "max_tokens": 24}
        return {"messages": messages, **plain}


async def said(client: aiohttp.ClientSession, body: Reply) -> Reply:
    """Return the reply to one request, which must succeed."""
    async with client.post(CHAT, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return (await answer.json())["choices"][0]["message"]


async def undisturbed(engine: Bench, count: int, turns: int, *, lead: int = 1500) -> list[Talk]:
    """Return this many talks, with the replies of this engine; it is a new process afterwards.

    Only talks without ambiguous words: the division of a prompt into batches moves logprobs by 0.002, also on
    an engine without a sidecar, and plants divide it differently.
    """
    talks: list[Talk] = []
    async with aiohttp.ClientSession(engine.base) as client:
        for number in itertools.count():
            talk = Talk(number, lead=lead)
            talk.begins = await _rendered(client, talk.body(0))
            margins = [await _spoken(client, talk, turn) for turn in range(turns)]
            if min(margins) > MARGIN:
                talks.append(talk)
            if len(talks) == count:
                break
    await engine.restart()
    return talks


async def _rendered(client: aiohttp.ClientSession, body: Reply) -> Tokens:
    """Return the token ids of a prompt."""
    async with client.post("/apply-template", json=body) as answer:
        prompt = (await answer.json())["prompt"]
    async with client.post("/tokenize", json={"content": prompt, "add_special": True}) as answer:
        return Tokens((await answer.json())["tokens"])


async def _spoken(client: aiohttp.ClientSession, talk: Talk, turn: int) -> float:
    """Add the reply to a turn.

    Return by how much its least certain word was likelier than the next candidate.
    """
    body = {**talk.body(turn), "logprobs": True, "top_logprobs": 2}
    async with client.post(CHAT, json=body) as answer:
        choice = (await answer.json())["choices"][0]
    talk.replies.append(choice["message"])
    words = [word["top_logprobs"] for word in choice["logprobs"]["content"]]
    return min((one["logprob"] - other["logprob"] for one, other in words), default=0.0)


async def take_turn(client: aiohttp.ClientSession, talk: Talk) -> None:
    assert await said(client, talk.body(talk.turn)) == talk.replies[talk.turn], f"talk {talk.number} differs"
    talk.turn += 1


@dataclass(slots=True)
class Witness:
    """Hashes every snapshot when it is kept, and every file when it is restored."""

    slots: Path
    kept: dict[str, str] = field(default_factory=dict)  # file name -> hash
    asked: list[tuple[str, str]] = field(default_factory=list)  # file name and hash of each restore
    refused: int = 0

    def watch(self, sidecar: Sidecar) -> None:
        assert sidecar.driver.snapshots
        self._watch_store(sidecar.driver.snapshots.store)
        for link in sidecar.driver.links.values():
            self._watch_client(link.client)

    def restored(self) -> set[SnapshotId]:
        return {SnapshotId(name.removesuffix(".slot")) for name, _ in self.asked}

    def agrees(self) -> None:
        """Check that only kept, unchanged files were restored, and that no engine refused one."""
        assert [(name, digest) for name, digest in self.asked if self.kept.get(name) != digest] == []
        assert self.refused == 0

    def _watch_store(self, store: Any) -> None:
        keep = store.keep

        async def seen(temporary: str, saved: SavedFile) -> Kept:
            kept = await keep(temporary, saved)
            name = f"{kept.id}.slot"
            self.kept[name] = digest(self.slots / name)
            return kept

        store.keep = seen

    def _watch_client(self, client: Any) -> None:
        restore = client.restore

        async def seen(slot: int, name: str, **more: Any) -> RestoreResult:
            self.asked.append((name, digest(self.slots / name)))
            self.refused += 1
            result = await restore(slot, name, **more)
            self.refused -= 1
            return result

        client.restore = seen


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class FixedRates(Rates):
    """The rates of a quiet machine, whatever is measured: a talk is restored, and its head gets no own file.

    The measured ones depend on what else the machine does (4,000 to 26,000 tokens per second). On a busy one
    a talk may be computed sooner than its file is read, a file for its head may pay, and a copy from the cold
    tier may come too late to be waited for.
    """

    def prefilled(self, tokens: int, seconds: float | None) -> None:
        """Learn nothing."""

    def restored(self, size: int, seconds: float) -> None:
        """Learn nothing."""

    def brought(self, size: int, seconds: float) -> None:
        """Learn nothing."""

    def saved(self, size: int, seconds: float) -> None:
        """Learn nothing."""

    def bring_within(self, tokens: int) -> float:
        return PATIENCE


def prefer_files(sidecar: Sidecar) -> None:
    """Have the sidecar restore a talk that has a file, however busy the machine is."""
    for table in sidecar.driver.placement.tables.values():
        table.rates = FixedRates(prefill=Measured(PREFILL))


@asynccontextmanager
async def in_front_of(
    engine: Bench, witness: Witness | None = None, *, flags: bool = True, **more: Any
) -> AsyncIterator[tuple[Sidecar, aiohttp.ClientSession]]:
    """Run a sidecar with snapshots, and a client of it. It restores a talk that has a file.

    Without `flags` the sidecar does not know the engine's flags.
    """
    ours = {"slot_dir": engine.slots, "save_pause": SOON, "idle_tokens": PREFETCHED, "drain_timeout": 1.0}
    wanted = {**ours, **more}
    async with (
        running(settings(engine.base, **wanted), engine.flags if flags else None) as sidecar,
        aiohttp.ClientSession(f"http://{sidecar.addresses[0]}") as client,
    ):
        if witness:
            witness.watch(sidecar)
        await ready(sidecar)
        prefer_files(sidecar)
        yield sidecar, client


async def settled(sidecar: Sidecar) -> None:
    """Wait until everything that is due is saved, and files are where they belong."""
    driver = sidecar.driver
    assert driver.snapshots
    # Two tasks of each engine never end, nor do two of the folders: one looks for folders that were not read,
    # the other measures their room. Others run as long as a folder cannot be used.
    lasting = 2 * len(driver.links) + 2 + (not driver.snapshots.ready)
    lasting += sum(link.lacks_files for link in driver.links.values())
    if driver.snapshots.sharing:
        lasting += WRITERS + 1  # one collects garbage

    def still() -> bool:
        working = len(driver.tasks) - (driver.effect_runner._alarm is not None)
        return not driver.placement.unsaved(driver.now()) and working <= lasting

    await until(still, "all is saved")


def known(sidecar: Sidecar) -> dict[SnapshotId, Kept]:
    """Return the snapshots that the store has."""
    assert sidecar.driver.snapshots
    return {kept.id: kept for kept in sidecar.driver.snapshots.store.listing()}


async def turn_and_save(sidecar: Sidecar, client: aiohttp.ClientSession, talk: Talk) -> None:
    """Send one turn, and wait until everything is saved."""
    await take_turn(client, talk)
    await settled(sidecar)


def in_slot(sidecar: Sidecar, talk: Talk) -> bool:
    """Whether a slot holds the talk. With more talks than slots, measured times decide which is evicted."""
    tables = sidecar.driver.placement.tables.values()
    return any(held and held.tokens and talk.owns(held) for table in tables for held in table.shadow.slots)


def deepest(talk: Talk, kept: Mapping[SnapshotId, Kept]) -> SnapshotId:
    """Return the snapshot from which its next turn continues. Raises ValueError if there is none."""
    return max(filter(talk.owns, kept.values()), key=lambda one: len(one.tokens)).id


def operations(sidecar: Sidecar) -> dict[tuple[str, str], float]:
    """Return slotkeeper_snapshot_operations_total by op and outcome."""
    (family,) = sidecar.metrics.operations.collect()
    return {
        (sample.labels["op"], sample.labels["outcome"]): sample.value
        for sample in family.samples
        if sample.name.endswith("_total")
    }
