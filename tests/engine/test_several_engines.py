"""Two engines of one model and one slot folder: named, drained, added, removed, killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from benchmarks.engines import deaths

from chaos.raw import until
from patience import PATIENCE
from slotkeeper.app import Sidecar, running
from slotkeeper.bench import lab
from slotkeeper.bench.lab import rested
from slotkeeper.cli.main import main
from slotkeeper.scheduler.rates import TRIPS
from slotkeeper.scheduler.types import EngineId

CHAT = "/v1/chat/completions"
LONG = "The lighthouse keeper counts the ships that pass by night. " * 60
LEFT, RIGHT = EngineId("left"), EngineId("right")
LEAST = 600  # tokens that must be reused at least


@pytest.fixture
def pair(engine_factory, build, tmp_path: Path):
    """Start two engines that can use each other's files."""
    folder = tmp_path / "slots"
    folder.mkdir(mode=0o700)
    return [engine_factory("tiny-hybrid", build, args=["--slot-save-path", str(folder)]) for _ in range(2)]


@asynccontextmanager
async def in_front_of(folder: Path, **more: Any) -> AsyncIterator[tuple[Sidecar, httpx.AsyncClient]]:
    ours = {"listen": "127.0.0.1:0", "admin_listen": "127.0.0.1:0", "drain_delay": 0, "drain_timeout": 1.0}
    settings = lab.settings_of(**{**ours, "slot_dir": folder, "save_pause": 0.05, "idle_tokens": 0, **more})
    async with (
        running(settings) as sidecar,
        httpx.AsyncClient(base_url=f"http://{sidecar.addresses[0]}", timeout=PATIENCE) as client,
    ):
        await until(lambda: all(link.ready for link in sidecar.driver.links.values()))
        yield sidecar, client


def names(one: Any, other: Any) -> tuple[str, ...]:
    return f"left={one.base}", f"right={other.base}"


async def ask(client: httpx.AsyncClient, *said: str) -> tuple[str, int]:
    """Return the reply, and the cached tokens of its prompt."""
    turns = [{"role": "user" if n % 2 == 0 else "assistant", "content": text} for n, text in enumerate(said)]
    plain = {"chat_template_kwargs": {"plain": True}, "temperature": 0, "max_tokens": 8}
    answer = await client.post(CHAT, json={"messages": turns, **plain})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["choices"][0]["message"]["content"], found["timings"]["cache_n"]


async def admin(sidecar: Sidecar, path: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=f"http://{sidecar.addresses[1]}", timeout=PATIENCE) as client:
        return await client.get(path)


async def state(sidecar: Sidecar) -> dict[str, Any]:
    """Return the admin port's state of each engine."""
    return {one["engine"]: one for one in (await admin(sidecar, "/api/state")).json()["engines"]}


async def command(sidecar: Sidecar, *words: str) -> int:
    where = ("--admin", f"http://{sidecar.addresses[1]}")
    return await asyncio.to_thread(main, [*words, *where])


def last_engine(sidecar: Sidecar) -> str | None:
    return next(iter(sidecar.driver.journal)).engine


async def test_a_conversation_of_a_drained_engine_continues_on_the_other_engine(pair, tmp_path, capsys):
    async with in_front_of(tmp_path / "slots", upstream=names(*pair)) as (sidecar, client):
        reply, _ = await ask(client, LONG)
        first = last_engine(sidecar)
        assert first in {"left", "right"}
        (other,) = {"left", "right"} - {first}
        assert await command(sidecar, "drain", first) == 0
        assert f"{first} is drained" in capsys.readouterr().out
        assert await command(sidecar, "drain", "middle") == 1
        refusal = " ".join(capsys.readouterr().err.split())
        assert "there is no engine 'middle'; there is left, right" in refusal
        seen = await state(sidecar)
        assert (seen[first]["draining"], seen[first]["drained"], seen[first]["up"]) == (True, True, True)
        assert not seen[other]["draining"]
        _, cached = await ask(client, LONG, reply, "And then?")
        assert last_engine(sidecar) == other
        assert cached > LEAST
        assert await command(sidecar, "undrain", first) == 0
        assert await command(sidecar, "drain", other) == 0
        _, cached = await ask(client, LONG, reply, "And then?")
        assert last_engine(sidecar) == first
        assert cached > LEAST


async def test_requests_at_fault_take_no_engine_out(pair, tmp_path):
    """The engine answers 500 to them, as if it had failed."""
    async with in_front_of(tmp_path / "slots", upstream=names(*pair)) as (sidecar, client):
        said = [{"role": "user", "content": LONG}]
        picture = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}
        faults: list[dict[str, Any]] = [
            {"messages": said, "tools": [{}]},
            {"messages": said, "reasoning_format": "none at all"},
            {"messages": [{"role": "user", "content": [picture]}]},
            {"messages": [{"content": LONG}]},
        ]
        statuses = []
        for number in range(2 * TRIPS):
            answer = await client.post(CHAT, json=faults[number % len(faults)])
            statuses.append(answer.status_code)
        assert statuses.count(500) >= TRIPS
        await until(lambda: len(sidecar.driver.journal) == 2 * TRIPS)
        await rested(sidecar)
        value = sidecar.metrics.registry.get_sample_value
        for table in sidecar.driver.placement.tables.values():
            assert not value("slotkeeper_engine_failures_total", {"engine": table.engine})
            assert not table.failing


async def test_while_all_engines_are_drained_requests_wait_and_none_is_lost(pair, tmp_path):
    async with in_front_of(tmp_path / "slots", upstream=names(*pair)) as (sidecar, client):
        for name in ("left", "right"):
            assert await command(sidecar, "drain", name) == 0
        assert (await admin(sidecar, "/readyz")).status_code == 503
        waiting = asyncio.ensure_future(ask(client, "Hello"))  # noqa: TID251
        await until(lambda: sidecar.driver.placement.queued == 1)
        assert await command(sidecar, "undrain", "right") == 0
        assert (await waiting)[1] == 0
        assert last_engine(sidecar) == "right"


def table(**engines: str) -> str:
    return "\n".join(
        f'[{name}]\nurl = "{url}"\nlabels = {{card = "{name}"}}' for name, url in engines.items()
    )


async def test_the_table_of_engines_is_read_again_while_requests_are_served(pair, tmp_path, capsys):
    """One engine is added, a bad file changes nothing, and a removed engine is drained and dropped."""
    left, right = pair
    path = tmp_path / "engines.toml"
    path.write_text(table(left=left.base))
    async with in_front_of(tmp_path / "slots", upstreams_file=path) as (sidecar, client):
        driver = sidecar.driver
        assert list(driver.links) == ["left"]
        reply, _ = await ask(client, LONG)
        path.write_text(table(left=left.base, right=right.base))
        sidecar.reload()
        await until(lambda: driver.links[RIGHT].ready)
        assert (await state(sidecar))["right"]["labels"] == {"card": "right"}
        process = driver.links[LEFT].process
        for bad in ("", "[left]\nurl = 8", table(left=right.base), "[left"):
            path.write_text(bad)
            sidecar.reload()
            assert list(driver.links) == ["left", "right"]
        assert "not_reloaded" in capsys.readouterr().out
        assert driver.links[LEFT].process == process
        path.write_text(table(right=right.base))
        sidecar.reload()
        await until(lambda: list(driver.links) == ["right"])
        assert list(driver.placement.tables) == ["right"]
        _, cached = await ask(client, LONG, reply, "And then?")
        assert cached > LEAST
        metrics = (await admin(sidecar, "/metrics")).text
        assert 'slotkeeper_engine_up{engine="right"} 1.0' in metrics
        assert 'engine="left"' not in metrics


async def test_a_running_answer_ends_before_its_engine_is_removed(pair, tmp_path):
    left, right = pair
    path = tmp_path / "engines.toml"
    path.write_text(table(left=left.base))
    async with in_front_of(tmp_path / "slots", upstreams_file=path) as (sidecar, client):
        driver, pieces = sidecar.driver, 0
        body = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 300, "ignore_eos": True}
        async with client.stream("POST", CHAT, json={**body, "stream": True}) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            path.write_text(table(right=right.base))
            sidecar.reload()
            assert driver.links[LEFT].draining
            async for line in lines:
                pieces += line.startswith("data: ")
                last = line if line.startswith("data: ") else ""
        assert pieces >= 300, last
        await until(lambda: list(driver.links) == ["right"])
        await ask(client, "Hello")
        assert last_engine(sidecar) == "right"


async def test_a_drained_engine_is_removed_at_once(pair, tmp_path):
    left, right = pair
    path = tmp_path / "engines.toml"
    path.write_text(table(left=left.base, right=right.base))
    async with in_front_of(tmp_path / "slots", upstreams_file=path) as (sidecar, client):
        assert await command(sidecar, "drain", "left") == 0
        path.write_text(table(right=right.base))
        sidecar.reload()
        await until(lambda: list(sidecar.driver.links) == ["right"])
        path.write_text(table(left=left.base, right=right.base))
        sidecar.reload()
        await until(lambda: all(link.ready for link in sidecar.driver.links.values()))
        assert list(sidecar.driver.links) == ["right", "left"]
        assert not sidecar.driver.links[LEFT].draining
        await ask(client, "Hello")


async def test_conversations_that_pause_outlive_both_engines_killed_in_turn():
    """Compared with one perfect cache for both engines; `benchmarks.engines` has forty conversations."""
    found = await deaths(6, 4, at_once=2, reads=True)
    assert not found.failures
    assert found.broken <= 2 * 2, "two kills, and two requests at a time"
    assert found.requests == 24
    assert found.ratio <= 1.10


async def test_conversations_that_never_pause_lose_only_what_was_in_no_file_when_their_engine_was_killed():
    found = await deaths(12, 4, at_once=2)
    assert not found.failures
    assert found.broken <= 2 * 2, "two kills, and two requests at a time"
    assert found.requests == 48
    assert found.waited <= 1.3 * found.oracle + found.unsaved
