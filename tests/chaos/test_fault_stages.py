"""The engine dies at every stage of a request, and returns unchanged, with other flags, or as another model.

Checked each time: the client's answer, the figures, and that nothing is lost: the table of
docs/reliability.md.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from structlog.testing import capture_logs

from chaos.fake_answers import looks_whole
from chaos.lab_snapshots import prefer_files
from chaos.raw import cut_short, until
from chaos.soak import events, text_of
from patience import PATIENCE
from recipes import damaged
from slotkeeper.api.head import Api
from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.models import build as build_model
from slotkeeper.bench.texts import prose
from slotkeeper.engine.child.process import EngineDiedError
from slotkeeper.scheduler.types import EngineId

pytestmark = pytest.mark.one_in(8)

CHAT: Final = "/v1/chat/completions"
ON_ITS_WAY: Final = 0.1  # seconds after which a call has reached an engine that is stopped
MOMENT: Final = 0.01  # seconds
TRIES: Final = 10  # to kill an engine in the middle of a prefill
# Longer than any test of a running answer, and less than the context of one of three slots.
ENDLESS: Final = {"stream": True, "max_tokens": 15_000, "ignore_eos": True}
CONTEXT: Final = 32768


class Fate(StrEnum):
    """The engine after its return."""

    SAME = "as it was"
    FLAGS = "with other flags"
    MODEL = "as another model"  # the last one: the engine stays that model

    @property
    def args(self) -> tuple[str, ...]:
        match self:
            case Fate.SAME:
                return ()
            case Fate.FLAGS:
                return ("-np", "3", "-b", "512")
            case Fate.MODEL:
                return ("-m", str(build_model(Tiny.DENSE)))


class Stage(StrEnum):
    """What the sidecar is doing when the engine dies."""

    CONNECT = "connect"
    LINE = "in line"
    PLANT = "plant"
    SAVE = "save"
    RESTORE = "restore"
    HEAD = "before the head"
    PREFILL = "prefill"
    STREAM = "stream"


COUNTED: Final[dict[Stage, tuple[str, dict[str, str]]]] = {
    Stage.PLANT: ("slotkeeper_fallbacks_total", {"reason": "plant"}),
    Stage.SAVE: ("slotkeeper_snapshot_operations_total", {"op": "save", "outcome": "lost"}),
    Stage.RESTORE: ("slotkeeper_snapshot_operations_total", {"op": "restore", "outcome": "lost"}),
    Stage.HEAD: ("slotkeeper_requests_sent_again_total", {}),
    Stage.PREFILL: ("slotkeeper_requests_sent_again_total", {}),
    Stage.STREAM: ("slotkeeper_requests_total", {"route": "chat", "outcome": "broken"}),
}


class Length(StrEnum):
    SHORT = "short"
    PREFIX = "long prefix"  # a restore takes less time than computing it
    QUESTION = "long question"  # one line, so that nothing in it is planted: the request computes it


def turns(number: int, length: Length = Length.SHORT) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two turns of one conversation, with a scripted reply in between."""
    prefix = prose(20_000 if length is Length.PREFIX else 3000, number)
    question = prose(20_000, 70 + number).replace("\n", " ") if length is Length.QUESTION else ""
    first = [
        {"role": "system", "content": f"Conversation {number}. {prefix}"},
        {"role": "user", "content": prose(400, 50 + number)},
    ]
    asks = {"role": "user", "content": f"{question} And what follows?"}
    second = [{"role": "assistant", "content": "I see."}, asks]
    plain = {"chat_template_kwargs": {"plain": True}, "temperature": 0, "max_tokens": 12}
    return {"messages": first, **plain}, {"messages": first + second, **plain}


@pytest.fixture(scope="module")
def known(build, tmp_path_factory) -> dict[tuple[Fate, Length], str]:
    """Return each fate's answer to the second turn of its conversation, from an engine alone."""
    folder = tmp_path_factory.mktemp("alone")

    async def each() -> dict[tuple[Fate, Length], str]:
        found = {}
        for number, fate in enumerate(Fate):
            (own := folder / str(number)).mkdir()
            async with (
                lab.tiny_engine(Tiny.HYBRID, build, own, *fate.args, context_tokens=CONTEXT) as alone,
                aiohttp.ClientSession(alone.base) as client,
            ):
                for length in Length:
                    found[fate, length] = await said(client, turns(number, length)[1])
        return found

    return asyncio.run(each())


async def said(client: aiohttp.ClientSession, body: dict[str, Any]) -> str:
    async with client.post(CHAT, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return text_of(await answer.json())


async def heard(client: aiohttp.ClientSession, body: dict[str, Any]) -> bytes:
    async with client.post(CHAT, json=body | {"stream": True}) as answer:
        return await answer.read()


@dataclass
class Scene:
    """One sidecar, and an engine that dies."""

    engine: lab.Restartable
    sidecar: Sidecar
    client: aiohttp.ClientSession
    folder: Path
    dead: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def link(self) -> Any:
        return self.sidecar.driver.links[EngineId(self.engine.base)]

    def die(self) -> None:
        self.engine.kill()
        self.dead.set()

    async def death(self) -> None:
        async with asyncio.timeout(PATIENCE):
            await self.dead.wait()

    async def comes_back(self, *args: str) -> None:
        """Start the engine again, with these additional flags."""
        await until(lambda: not self.link.up, "the sidecar has seen it")
        await self.engine.start(*args)
        self.dead.clear()

    def dies_in(self, owner: Any, name: str) -> None:
        """Kill the engine in the next call of this method.

        The engine is stopped first, so that it never does the work.
        """
        real = getattr(owner, name)

        async def call(*args: Any, **more: Any) -> Any:
            if name == "restore" and not args[1].endswith(".slot"):  # a probe uses its own file
                return await real(*args, **more)
            setattr(owner, name, real)
            assert self.engine.process.pid
            os.killpg(self.engine.process.pid, signal.SIGSTOP)
            # until all its threads are stopped: on a busy machine some run for a moment
            os.waitpid(self.engine.process.pid, os.WUNTRACED)  # noqa: ASYNC222 - nothing else is to go on
            asked = asyncio.get_running_loop().create_task(real(*args, **more))
            await asyncio.sleep(ON_ITS_WAY)
            self.die()
            return await asked

        setattr(owner, name, call)

    def dies_behind(self, owner: Any, name: str) -> None:
        """Kill the engine after the next call of this method has the head of its answer.

        Until then the engine runs for moments only: on a busy machine it could write its whole answer before
        the test sees the head.
        """
        real = getattr(owner, name)

        async def call(*args: Any, **more: Any) -> Any:
            setattr(owner, name, real)
            assert self.engine.process.pid
            asked = asyncio.get_running_loop().create_task(real(*args, **more))
            while not asked.done():
                os.killpg(self.engine.process.pid, signal.SIGCONT)
                time.sleep(MOMENT)  # noqa: ASYNC251 - nothing of ours delays the next stop
                os.killpg(self.engine.process.pid, signal.SIGSTOP)
                await asyncio.sleep(MOMENT)
            self.die()
            return await asked

        setattr(owner, name, call)

    def counted(self, stage: Stage) -> float:
        name, labels = COUNTED[stage]
        return self.sidecar.metrics.registry.get_sample_value(name, labels) or 0


@pytest.fixture
async def scene(build, tmp_path) -> AsyncIterator[Scene]:
    async with (
        lab.tiny_engine(Tiny.HYBRID, build, tmp_path, context_tokens=CONTEXT) as engine,
        lab.in_front_of(
            engine.base,
            slot_dir=tmp_path / "slots",
            save_pause=lab.PAUSE_SECONDS,
            read_flags=True,
            keep_alive=0.05,
        ) as sidecar,
        aiohttp.ClientSession(lab.url_of(sidecar)) as client,
    ):
        prefer_files(sidecar)
        yield Scene(engine, sidecar, client, tmp_path / "slots")


async def dies(scene: Scene, stage: Stage, first: Any, second: Any) -> Callable[[], Awaitable[str | None]]:
    """Kill the engine at that stage of the second turn. Returns a coroutine for that turn's answer.

    None: the stage was over before the kill, since the engine had the processor for longer than intended.
    """
    loop, upstream = asyncio.get_running_loop(), scene.sidecar._upstream
    match stage:
        case Stage.CONNECT:
            scene.die()
            return lambda: said(scene.client, second)
        case Stage.LINE:
            return await _dies_while_it_waits(scene, second)
        case Stage.PLANT:
            scene.dies_in(scene.link.client, "prefill")
        case Stage.SAVE:
            scene.dies_in(scene.link.client, "save")
            opening = loop.create_task(said(scene.client, first))  # saved after it, or a part of it before
            await scene.death()

            async def both() -> str:
                assert await opening
                return await said(scene.client, second)

            return both
        case Stage.RESTORE:
            scene.die()
            await scene.comes_back()  # an engine with other flags leaves files that this one cannot load
            await said(scene.client, first)
            await lab.rested(scene.sidecar)
            scene.engine.kill()
            await until(lambda: not scene.link.up, "the sidecar has seen it")
            scene.dies_in(scene.link.client, "restore")  # for the client, or earlier
            waits = loop.create_task(said(scene.client, second))
            with suppress(EngineDiedError):  # the restore may come before `start` has seen that it serves
                await scene.engine.start()
            await scene.death()
            return lambda: waits
        case Stage.HEAD:
            scene.dies_in(upstream, "send")
        case Stage.PREFILL:
            return await _dies_in_prefill(scene, second)
    answer = loop.create_task(said(scene.client, second))
    await scene.death()
    return lambda: answer


async def _dies_in_prefill(scene: Scene, body: Any) -> Callable[[], Awaitable[str | None]]:
    scene.dies_behind(scene.sidecar._upstream, "send")  # the head comes when the task begins
    asked = asyncio.get_running_loop().create_task(heard(scene.client, body))
    await scene.death()

    async def rest() -> str | None:
        stream = await asked
        if b"broke off" in stream and b'"delta"' in stream:  # the answer had begun
            return None
        assert looks_whole(Api.CHAT, stream), stream[-300:]
        return "".join(map(text_of, events(stream)))

    return rest


async def _dies_while_it_waits(scene: Scene, body: Any) -> Callable[[], Awaitable[str]]:
    async with AsyncExitStack() as stack:
        slots = len(scene.sidecar.driver.placement.tables[scene.link.engine].states)
        for number in range(slots):
            endless = turns(90 + number)[0] | ENDLESS
            answer = await stack.enter_async_context(scene.client.post(CHAT, json=endless))
            await answer.content.readany()
        waits = asyncio.get_running_loop().create_task(said(scene.client, body))
        await until(lambda: scene.sidecar.driver.placement.queued == 1, "it waits")
        scene.die()
    return lambda: waits


@pytest.mark.parametrize("stage", [stage for stage in Stage if stage is not Stage.STREAM])
async def test_requests_wait_for_an_engine_that_dies_whatever_its_flags_and_model_are_afterwards(
    scene, known, stage
):
    length = {Stage.RESTORE: Length.PREFIX, Stage.PREFILL: Length.QUESTION}.get(stage, Length.SHORT)
    for number, fate in enumerate(Fate):
        first, second = turns(number, length)
        before = scene.counted(stage) if stage in COUNTED else 0
        with capture_logs() as log:
            for _ in range(TRIES):
                answer = await dies(scene, stage, first, second)
                await scene.comes_back(*fate.args)
                if (text := await answer()) is not None:
                    break
            assert text == known[fate, length], fate
            await lab.rested(scene.sidecar)
        seen = [line for line in log if line["event"] in {"engine_up", "engine_lost", "engine_probe_failed"}]
        assert seen[-1]["event"] == "engine_up", "\n".join([*map(str, log), scene.engine.process.tail()])
        assert "engine_lost" in {line["event"] for line in seen}
        assert stage not in COUNTED or scene.counted(stage) > before, "\n".join([fate, *map(str, log)])
    await nothing_is_left(scene)


async def test_a_running_stream_ends_with_an_error_whatever_the_engine_is_afterwards(scene, known):
    """The next client with the same request is answered."""
    for number, fate in enumerate(Fate):
        _, second = turns(number)
        before = scene.counted(Stage.STREAM)
        async with scene.client.post(CHAT, json=second | ENDLESS) as answer:
            stream = await answer.content.readuntil(b"data: ")
            scene.die()
            stream += await cut_short(answer)
        assert b"[DONE]" not in stream
        assert scene.counted(Stage.STREAM) == before + 1
        await scene.comes_back(*fate.args)
        assert await said(scene.client, second) == known[fate, Length.SHORT], fate
        await lab.rested(scene.sidecar)
    await nothing_is_left(scene)


async def nothing_is_left(scene: Scene) -> None:
    """Check that every file is complete, and that no engine refused a file or got one of another engine."""
    driver = scene.sidecar.driver
    assert driver.snapshots
    assert await damaged(driver.snapshots.store) == {}
    assert not list(scene.folder.glob("*.tmp"))
    value = scene.sidecar.metrics.registry.get_sample_value
    name = "slotkeeper_snapshot_operations_total"
    assert value(name, {"op": "restore", "outcome": "refused"}) == 0
    assert value(name, {"op": "save", "outcome": "ok"}), "files were there to be mistaken"
    assert "0 requests" in repr(driver.placement)
    assert not driver._grants
    assert not driver.effect_runner.planting
