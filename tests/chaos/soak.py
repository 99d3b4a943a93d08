"""Many clients for a long time, with faults: no errors beyond the faults, no wrong text, no leak.

`make soak`, or `PYTHONPATH=tests:. python -m chaos.soak [--minutes 20] [--clients 64] [--seed N]`.

Two halves: a dense model on the older build, a hybrid one on the newest, each behind its own `slotkeeper
serve` with a slot folder. Clients play scripted conversations of five agents on five routes, turn by turn:
whole or streamed, reading slowly, disconnecting in the middle and sending the request again, with an edited
message and a title request in between. The engine is killed with -9 every two minutes, and started again. The
expected answers come from an engine alone, with greedy sampling. Requests with an ambiguous word in the
answer are left out, so the comparison is exact.

Each half warms up first, then rests. At the end the sidecar may hold no more than in that rest (of memory,
16 MiB more).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import secrets
import socket
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson
from benchmarks.figures import console, keep
from rich.table import Table
from yarl import URL

from chaos.fake_answers import PATHS, looks_whole
from commands.process import serving
from engine.dialects import BODIES
from engine.mixes import tool
from patience import PATIENCE
from slotkeeper.api.head import Api
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.target import PLAIN, Turn
from slotkeeper.bench.texts import prose, system
from slotkeeper.engine.child.launch import runs_skulk
from slotkeeper.engine.client import KEPT

WORLDS: Final = ((Tiny.DENSE, "b10434" if runs_skulk() else "b11549"), (Tiny.HYBRID, "b11549"))
SLOTS: Final = 4
CONTEXT: Final = 4096  # tokens of each slot
AGENTS: Final = 5
TALKS: Final = 20  # four conversations of each agent, more than there are slots
TURNS: Final = 3
WORDS: Final = 8  # tokens of an answer
MARGIN: Final = 0.05  # logprob: how much likelier each word of an answer is than the next candidate
WARM_UP: Final = 1 / 3  # share of the time
KILL_SECONDS: Final = 120.0
DOWN_SECONDS: Final = (0.2, 3.0)
UNCHANGED_SECONDS: Final = 7.0  # longer than the engine keeps an idle connection
GROWTH_KIB: Final = 16 * 1024  # of memory, from the rest in the middle to that at the end
TROUBLES: Final = frozenset({"task_failed", "effect_failed", "placement_failed", "exchange_failed"})
Doc = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One request of a conversation, and its answer."""

    api: Api
    body: Doc
    text: str


class Manner(StrEnum):
    WHOLE = "whole"
    STREAM = "stream"
    SLOWLY = "slowly"  # a stream that is read in small pieces
    LEAVES = "leaves"  # disconnects at some moment, and sends the request again
    HANGS_UP = "hangs up"  # the same, of an answer in one piece


HOW_OFTEN: Final = {
    Manner.WHOLE: 4,
    Manner.STREAM: 6,
    Manner.SLOWLY: 2,
    Manner.LEAVES: 2,
    Manner.HANGS_UP: 1,
}
STREAMED: Final = frozenset({Manner.STREAM, Manner.SLOWLY, Manner.LEAVES})


class Verdict(StrEnum):
    OK = "right"
    LEFT = "left by the client"
    BROKEN = "broken by a kill"  # its answer had begun, so it cannot be sent again
    ERROR = "error"
    WRONG = "wrong"


# -- requests, and the right answers --------------------------------------------------------------------


Script = Generator[Turn, Doc | None, Any]


def script(number: int) -> Script:
    """Send three turns with a title after the first, then the edited second one, and one more turn."""
    agent = number % AGENTS
    tools = [tool(f"tool_{agent}_{n}", 10 * agent + n) for n in range(agent % 3)]
    fields = {**PLAIN, **({"tools": tools} if tools else {})}
    lead = {"role": "system", "content": f"You are agent {agent}. {prose(900, agent)}"}

    def asks(history: Sequence[Doc], about: str) -> Generator[Turn, Doc | None, list[Doc]]:
        """Send one turn, in other words until the answer is unambiguous. Return the history with both."""
        for wording in itertools.count():
            text = f"Talk {number}, {about}. {prose(300, 100 * number + wording)}"
            asked = [*history, {"role": "user", "content": text}]
            reply = yield Turn(label=about, messages=tuple(asked), max_tokens=WORDS, fields=fields)
            if reply:
                return [*asked, reply]
        raise AssertionError

    history = [lead]
    for turn in range(TURNS):
        history = yield from asks(history, f"question {turn}")
        if turn == 0:
            yield from asks([system("Write a short title for this chat.")], "title")
    history = yield from asks(history[:3], "edited")
    yield from asks(history, "what follows")


def body_of(api: Api, turn: Turn) -> Doc:
    """Return the body as a client of that route sends it."""
    if api in BODIES:
        return BODIES[api](turn)
    text = "".join(f"{one['role']}: {one['content']}\n\n" for one in turn.messages)
    limit = "n_predict" if api is Api.COMPLETION else "max_tokens"
    return {"prompt": f"{text}assistant:", limit: turn.max_tokens, "temperature": 0}


async def references(base: str) -> list[list[Step]]:
    """Return conversations with the answers of an engine that is used directly."""
    async with aiohttp.ClientSession(base) as client:
        kinds = tuple(PATHS)
        return [await _steps(client, kinds[n % len(kinds)], script(n)) for n in range(TALKS)]


async def _steps(client: aiohttp.ClientSession, api: Api, talk: Script) -> list[Step]:
    """Return the steps with unambiguous answers: the division of prompts into batches moves logprobs."""
    witness = Api.COMPLETION if api in {Api.COMPLETION, Api.COMPLETIONS} else Api.CHAT
    more = {"n_probs": 2} if witness is Api.COMPLETION else {"logprobs": True, "top_logprobs": 2}
    steps, turn = list[Step](), next(talk)
    while True:
        body = body_of(api, turn)
        text = text_of(await _said(client, api, body))
        answer = await _said(client, witness, body_of(witness, turn) | more)
        clear = text_of(answer) == text and _margin(answer) >= MARGIN
        if clear:
            steps.append(Step(api=api, body=body, text=text))
        try:
            turn = talk.send({"role": "assistant", "content": text} if clear else None)
        except StopIteration:
            return steps


async def _said(client: aiohttp.ClientSession, api: Api, body: Doc) -> Doc:
    async with client.post(PATHS[api], json=body) as answer:
        assert answer.status == 200, await answer.text()
        doc: Doc = await answer.json()
        return doc


def _margin(answer: Doc) -> float:
    """Return by how much its least certain word was likelier than the next candidate."""
    words = answer.get("completion_probabilities") or answer["choices"][0]["logprobs"]["content"]
    pairs = (word["top_logprobs"] for word in words)
    return min((one["logprob"] - other["logprob"] for one, other in pairs), default=0.0)


def text_of(doc: Any) -> str:
    """Return the text in an answer, or in one event of it."""
    match doc:
        case {"choices": [{"delta": {"content": str(text)}}, *_]} | {"choices": [{"text": str(text)}, *_]}:
            return text
        case {"choices": [{"message": {"content": str(text)}}, *_]} | {"content": str(text)}:
            return text
        case {"type": "content_block_delta", "delta": {"text": str(text)}}:
            return text
        case {"type": "response.output_text.delta", "delta": str(text)}:
            return text
        case {"type": "message", "content": list(blocks)}:
            return "".join(block.get("text", "") for block in blocks)
        case {"output": list(items)}:
            return "".join(map(text_of, items))
    return ""


def events(stream: bytes) -> Iterator[Doc]:
    for line in stream.split(b"\n")[:-1]:  # the last line may be incomplete
        if line.startswith(b"data: {"):
            yield orjson.loads(line[6:])


# -- clients ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Heard:
    """The outcome of one request."""

    began: float
    status: int = 0
    data: bytearray = field(default_factory=bytearray)
    left: bool = False
    failure: str = ""


def judged(step: Step, heard: Heard, *, streamed: bool, killed: float) -> Verdict:
    """Return the outcome of a request. `killed`: time of the engine's last kill."""
    data = bytes(heard.data)
    if heard.status != 200:
        return Verdict.LEFT if heard.left else Verdict.ERROR
    if streamed:
        text, whole = "".join(map(text_of, events(data))), looks_whole(step.api, data)
        begun = b"data: " in data
    else:
        whole = not heard.failure and not heard.left
        text, begun = text_of(orjson.loads(data)) if whole else "", True
    if not step.text.startswith(text) or (whole and text != step.text):
        return Verdict.WRONG
    if whole or heard.left:
        return Verdict.OK if whole else Verdict.LEFT
    return Verdict.BROKEN if begun and killed >= heard.began else Verdict.ERROR


@dataclass(slots=True)
class Crowd:
    """Clients of one sidecar."""

    base: str
    talks: Sequence[Sequence[Step]]
    seed: int
    clients: int
    tally: Counter[Verdict] = field(default_factory=Counter)
    manners: Counter[Manner] = field(default_factory=Counter)
    edits: int = 0
    kills: int = 0
    complaints: list[str] = field(default_factory=list)
    killed: float = 0.0
    over: float = 0.0

    async def talk(self, seconds: float) -> None:
        """Run all clients until the time is over; each finishes the request that it has begun."""
        self.over = time.monotonic() + seconds
        forever = aiohttp.ClientTimeout(None)
        quick, slow = aiohttp.TCPConnector(limit=0), aiohttp.TCPConnector(limit=0, socket_factory=narrow)
        async with (
            aiohttp.ClientSession(self.base, connector=quick, timeout=forever) as usual,
            aiohttp.ClientSession(self.base, connector=slow, timeout=forever, read_bufsize=512) as slowly,
            asyncio.TaskGroup() as group,
        ):
            for number in range(self.clients):
                group.create_task(self._client({True: slowly, False: usual}, number))

    async def _client(self, sessions: dict[bool, aiohttp.ClientSession], number: int) -> None:
        chance = random.Random(f"{self.seed} {number} {self.over}")
        key = {"Authorization": f"Bearer client-{number % 16}"}
        while True:
            for at, step in enumerate(chance.choice(self.talks)):
                if at == TURNS + 1:
                    self.edits += 1
                verdict = Verdict.ERROR
                while verdict is not Verdict.OK:
                    if time.monotonic() > self.over:
                        return
                    (manner,) = chance.choices(list(HOW_OFTEN), list(HOW_OFTEN.values()))
                    session = sessions[manner is Manner.SLOWLY]
                    verdict = await self._asks(session, step, manner, chance, key)
                await asyncio.sleep(chance.choice((0.0, 0.05, 1.0)))

    async def _asks(
        self,
        session: aiohttp.ClientSession,
        step: Step,
        manner: Manner,
        chance: random.Random,
        key: dict[str, str],
    ) -> Verdict:
        heard, streamed = Heard(time.monotonic()), manner in STREAMED
        leaves = manner in {Manner.LEAVES, Manner.HANGS_UP}
        patience = chance.choice((0.01, 0.2, 1.0, 4.0)) if leaves else PATIENCE
        most = chance.choice((1, 500, 1500, 1 << 30)) if leaves else 1 << 30  # bytes
        try:
            async with (
                asyncio.timeout(patience),
                session.post(PATHS[step.api], json=step.body | {"stream": streamed}, headers=key) as answer,
            ):
                heard.status = answer.status
                async for piece in pieces(answer, slowly=manner is Manner.SLOWLY):
                    heard.data += piece
                    if len(heard.data) >= most:
                        heard.left = True
                        break
        except TimeoutError:
            heard.left, heard.failure = leaves, "no answer in time"
        except aiohttp.ClientError as error:
            heard.failure = f"{type(error).__name__}: {error}"
        verdict = judged(step, heard, streamed=streamed, killed=self.killed)
        self.tally[verdict] += 1
        self.manners[manner] += 1
        if verdict in {Verdict.ERROR, Verdict.WRONG}:
            said = f"{heard.status} {bytes(heard.data[-700:]).decode(errors='replace')!r} {heard.failure}"
            self.complaints.append(f"{verdict} {step.api} {manner}: {said}; expected {step.text!r}")
        return verdict


def narrow(address: Any) -> socket.socket:
    """Return a socket with the smallest possible buffer."""
    family, kind, protocol, *_ = address
    plug = socket.socket(family, kind, protocol)
    plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    return plug


async def pieces(answer: aiohttp.ClientResponse, *, slowly: bool) -> AsyncIterator[bytes]:
    while piece := await (answer.content.read(200) if slowly else answer.content.readany()):
        yield piece
        if slowly:
            await asyncio.sleep(0.02)


# -- the sidecar, and the run ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What the sidecar's process holds while no client sends a request."""

    memory_kib: int
    descriptors: int  # without those of kept connections
    sockets: int  # without those of kept connections
    kept: int  # connections to the engine: calls use them in turn, so all that a burst opened may stay
    tasks: int

    def leaks(self, before: Standing) -> list[str]:
        """Return what has grown since `before`. Memory and kept connections may grow a little."""
        found, rooms = [], {"memory_kib": GROWTH_KIB, "kept": KEPT}
        for name, value in asdict(self).items():
            was, room = asdict(before)[name], rooms.get(name, 0)
            if value > was + room:
                found.append(f"{name}: {was} at the rest in the middle, {value} at the end")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    world: str
    seconds: float
    requests: int
    verdicts: dict[str, int]
    faults: dict[str, int]
    sent_again: int
    restored: int
    middle: Standing
    end: Standing
    complaints: list[str]  # errors that no fault explains, wrong texts, leaks, errors in the log


@dataclass(frozen=True, slots=True)
class Watched:
    """A sidecar process, watched from outside."""

    admin: aiohttp.ClientSession
    pid: int
    engine: int  # its port

    async def state(self) -> Doc:
        async with self.admin.get("/api/state") as answer:
            doc: Doc = await answer.json()
            return doc

    async def figure(self, name: str) -> int:
        """Return a figure of /metrics, summed over all labels that follow `name`."""
        async with self.admin.get("/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(name))

    async def standing(self) -> Standing:
        proc = Path(f"/proc/{self.pid}")
        fields = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        kept = connections(proc / "net/tcp", self.engine)
        links = list(targets(proc / "fd"))
        others = [link for link in links if link not in kept]
        return Standing(
            memory_kib=int(fields["RssAnon"].split()[0]),
            descriptors=len(others),
            sockets=sum(link.startswith("socket:") for link in others),
            kept=len(links) - len(others),
            tasks=(await self.state())["tasks"],
        )

    async def rests(self) -> bool:
        """Whether no request is left, and GET /slots shows every slot as idle."""
        doc = await self.state()
        slots = [slot["state"] for engine in doc["engines"] for slot in engine["slots"]]
        return not doc["queued"] and not doc["running"] and slots == ["idle"] * SLOTS

    async def at_rest(self) -> Standing:
        """Return its standing, once that has not changed for a while (except memory)."""
        async with asyncio.timeout(PATIENCE):
            since, before = time.monotonic(), None
            while True:
                now = await self.standing()
                same = before is not None and not now.leaks(before) and not before.leaks(now)
                if not same or not await self.rests():
                    since, before = time.monotonic(), now
                elif time.monotonic() - since > UNCHANGED_SECONDS:
                    return now
                await asyncio.sleep(0.25)


def targets(descriptors: Path) -> Iterator[str]:
    """Return the targets of a process's descriptors."""
    for one in descriptors.iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            yield str(one.readlink())


def connections(table: Path, port: int) -> set[str]:
    """Return the descriptors' targets of connections to that port.

    A closed one that lingers has no descriptor.
    """
    rows = (line.split() for line in table.read_text().splitlines()[1:])
    there = {row[9] for row in rows if int(row[2].rpartition(":")[2], 16) == port}
    return {f"socket:[{inode}]" for inode in there if inode != "0"}


async def world(model: Tiny, build: str, seconds: float, *, clients: int, seed: int) -> Result:
    """Run one half: warm up, rest, continue, rest."""
    with tempfile.TemporaryDirectory(prefix="slotkeeper-soak-") as name:
        folder, room = Path(name), ("-np", str(SLOTS), "-c", str(SLOTS * CONTEXT))
        async with lab.tiny_engine(model, build, folder, *room) as engine:
            talks = await references(engine.base)
            await engine.restart()
            words = ("--upstream", engine.base, "--slot-dir", str(folder / "slots"))
            log = folder / "slotkeeper.log"
            with log.open("wb") as stderr, serving(*words, stderr=stderr) as (process, data, admin):
                crowd = Crowd(f"http://{data}", talks, seed, clients)
                async with aiohttp.ClientSession(f"http://{admin}") as asking:
                    watched = Watched(asking, process.pid, URL(engine.base).port or 0)
                    await _part(crowd, engine, seconds * WARM_UP)
                    middle = await watched.at_rest()
                    await _part(crowd, engine, seconds * (1 - WARM_UP))
                    end = await watched.at_rest()
                    sent_again = await watched.figure("slotkeeper_requests_sent_again_total")
                    restored = await watched.figure(
                        'slotkeeper_snapshot_operations_total{op="restore",outcome="ok"}'
                    )
                process.terminate()
                code = await asyncio.to_thread(process.wait, PATIENCE)
            complaints = [*crowd.complaints, *end.leaks(middle), *troubles(log)]
    if code:
        complaints.append(f"the sidecar ended with {code}")
    return Result(
        world=f"{model}, {build}",
        seconds=seconds,
        requests=crowd.tally.total(),
        verdicts={verdict.value: crowd.tally[verdict] for verdict in Verdict},
        faults={
            "engine killed": crowd.kills,
            "messages edited": crowd.edits,
            "clients that left": crowd.manners[Manner.LEAVES] + crowd.manners[Manner.HANGS_UP],
            "slow readers": crowd.manners[Manner.SLOWLY],
        },
        sent_again=sent_again,
        restored=restored,
        middle=middle,
        end=end,
        complaints=complaints,
    )


async def _part(crowd: Crowd, engine: lab.Restartable, seconds: float) -> None:
    """Run the crowd, and kill the engine every two minutes, or as often as possible in half of the time."""
    chance = random.Random(f"{crowd.seed} kills")
    every = min(KILL_SECONDS, seconds / 2)
    async with asyncio.TaskGroup() as group:
        talking = group.create_task(crowd.talk(seconds))
        for _ in range(int(seconds / every - 0.25)):
            await asyncio.wait([talking], timeout=every)
            crowd.killed = time.monotonic()
            crowd.kills += 1
            engine.kill()
            await asyncio.sleep(chance.uniform(*DOWN_SECONDS))
            await engine.start()


def troubles(log: Path) -> list[str]:
    """Return the errors that our own code has logged."""
    lines = log.read_text().splitlines()
    found = [line for line in lines if not line.startswith("{") or orjson.loads(line)["event"] in TROUBLES]
    return [f"log: {line}" for line in found]


async def soak(minutes: float, *, clients: int, seed: int) -> list[Result]:
    seconds = 60 * minutes / len(WORLDS)
    return [await world(model, build, seconds, clients=clients, seed=seed) for model, build in WORLDS]


def table(results: Sequence[Result]) -> Table:
    shown = Table("", *(one.world for one in results), title="soak")

    def row(name: str, *values: object) -> None:
        shown.add_row(name, *map(str, values))

    row("seconds", *(one.seconds for one in results))
    row("requests", *(one.requests for one in results))
    for verdict in Verdict:
        row(f"  {verdict}", *(one.verdicts[verdict] for one in results))
    for name in results[0].faults:
        row(name, *(one.faults[name] for one in results))
    row("sent again", *(one.sent_again for one in results))
    row("restored from files", *(one.restored for one in results))
    for name in asdict(results[0].middle):
        row(f"{name}, middle and end", *(f"{asdict(r.middle)[name]} {asdict(r.end)[name]}" for r in results))
    row("complaints", *(len(one.complaints) for one in results))
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**32))
    chosen = parser.parse_args()
    console.print(f"{chosen.minutes:g} minutes, {chosen.clients} clients, seed {chosen.seed}")
    results = asyncio.run(soak(chosen.minutes, clients=chosen.clients, seed=chosen.seed))
    console.print(table(results))
    keep("soak", {"clients": chosen.clients, "seed": chosen.seed, "worlds": [asdict(one) for one in results]})
    for one in results:
        for complaint in one.complaints:
            console.print(f"{one.world}: {complaint}", markup=False, soft_wrap=True)
    return int(any(one.complaints for one in results))


if __name__ == "__main__":
    raise SystemExit(main())
