"""A request sent when the sidecar's port opens waits for the probe and is placed; its next turn reuses it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from benchmarks.first_seconds import CHAT, MESSAGES, Start, Talk, Way, is_good, ours, stock, turn

from builds import needs_b10434
from compatibility import Feature
from engine.test_engine_waits import WAITING, said, until
from patience import PATIENCE
from slotkeeper.api.head import DECISION
from slotkeeper.app import Sidecar, running
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.texts import prose
from slotkeeper.engine.child.launch import EngineKind
from slotkeeper.runtime.link import EngineLink
from slotkeeper.scheduler.types import Reason
from slotkeeper.settings import Settings

KEY = "a key of this engine"


@pytest.mark.parametrize(
    ("way", "model", "path"),
    [
        (Way.ALONE, Tiny.DENSE, CHAT),
        (Way.ALONE, Tiny.SWA, CHAT),
        (Way.ALONE, Tiny.HYBRID, MESSAGES),
        (Way.ALONE, Tiny.HYBRID_MTP, CHAT),
        (Way.BARE, Tiny.RECURRENT, MESSAGES),
        (Way.READ, Tiny.HYBRID, CHAT),
        (Way.SWAP, "writer", CHAT),
        (Way.SWAP, "coder", MESSAGES),
        pytest.param(Way.ROUTER, "writer", CHAT, marks=needs_b10434),
    ],
)
async def test_a_request_sent_when_the_port_opens_is_placed_and_reused(way, model, path):
    kind = EngineKind.SKULK if way is Way.ROUTER else EngineKind.XLLAMACPP
    start = Start(way=way, model=model, path=path, kind=kind)
    row = await ours(start, slowly=True) | {"stock": await stock(start)}
    assert is_good(row), row


def settings_of(base: str, **more: Any) -> Settings:
    plain: dict[str, Any] = {
        "upstream": (base,),
        "listen": lab.ANY_PORT,
        "admin_listen": lab.ANY_PORT,
        "read_flags": False,
    }
    return lab.settings_of(**(plain | {"drain_delay": 0, "drain_timeout": 1} | more))


async def status_of(client: aiohttp.ClientSession, url: str) -> tuple[int, str]:
    async with client.get(url) as answer:
        return answer.status, await answer.text()


def pause(engine: lab.Restartable, number: signal.Signals) -> None:
    assert engine.process.pid is not None
    os.kill(engine.process.pid, number)


@asynccontextmanager
async def held_in_its_probe(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    tiny: Tiny = Tiny.HYBRID,
    kind: str = EngineKind.XLLAMACPP,
    **more: Any,
) -> AsyncIterator[tuple[lab.Restartable, Sidecar, aiohttp.ClientSession, asyncio.Event]]:
    """Run a sidecar whose probe stops before its last step until the event is set."""
    goes_on, fitting = asyncio.Event(), EngineLink.fitting

    async def waits(link, reading):
        await goes_on.wait()
        return await fitting(link, reading)

    monkeypatch.setattr(EngineLink, "fitting", waits)
    async with (
        lab.tiny_engine(tiny, kind, folder) as engine,
        running(settings_of(engine.base, **more)) as sidecar,
        aiohttp.ClientSession(lab.url_of(sidecar), timeout=aiohttp.ClientTimeout(PATIENCE)) as client,
    ):
        (link,) = sidecar.driver.links.values()
        await until(lambda: link.probing)
        yield engine, sidecar, client, goes_on


async def test_while_the_engine_is_probed_nothing_is_ready_and_a_stream_gets_comments(tmp_path, monkeypatch):
    async with held_in_its_probe(tmp_path, monkeypatch, keep_alive=0.1) as (_, sidecar, client, goes_on):
        (link,) = sidecar.driver.links.values()
        readyz = f"http://{sidecar.addresses[1]}/readyz"
        value = sidecar.metrics.registry.get_sample_value
        assert (await status_of(client, readyz))[0] == 503
        assert (await status_of(client, "/health"))[0] == 503
        assert value("slotkeeper_engine_up", {"engine": link.engine}) == 0
        async with client.post(CHAT, json=said("Good day", stream=True)) as answer:
            heard = bytearray()
            while heard.count(WAITING) < 3:
                heard += await answer.content.readany()
            goes_on.set()
            heard += await answer.read()
        assert heard.endswith(b"data: [DONE]\n\n")
        assert await status_of(client, readyz) == (200, "ready\n")
        assert (await status_of(client, "/health"))[0] == 200
        assert value("slotkeeper_engine_up", {"engine": link.engine}) == 1
        assert not value("slotkeeper_decisions_total", {"reason": Reason.NOT_PROBED.value})


async def test_a_request_that_has_waited_for_the_probe_long_enough_goes_out_with_that_reason(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("slotkeeper.runtime.engines.LEAST_WAIT", 0.1)
    async with held_in_its_probe(tmp_path, monkeypatch, engine_wait=0.2) as (_, sidecar, client, _):
        async with client.post(CHAT, json=said("Good day")) as answer:
            assert (answer.status, answer.headers[DECISION]) == (200, Reason.NOT_PROBED)
        value = sidecar.metrics.registry.get_sample_value
        for name in ("decisions", "fallbacks"):
            assert value(f"slotkeeper_{name}_total", {"reason": "not_probed"}) == 1


async def turns(base: str, path: str, *, before_last: Callable[[], Awaitable[None]]) -> list[str | None]:
    """Play two conversations; return the decision on each request. Calls `before_last` before the last."""
    talks = [Talk(Start(way=Way.ALONE, model="", path=path)) for _ in range(2)]
    talks[1].messages.append({"role": "system", "content": prose(1200, 1)})
    async with httpx.AsyncClient(base_url=base, timeout=PATIENCE) as client:
        answers = [await turn(client, talks[0]), await turn(client, talks[1]), await turn(client, talks[0])]
        await before_last()
        answers.append(await turn(client, talks[0]))
    return [answer.headers.get(DECISION) for answer in answers]


@pytest.mark.shows(Feature.FIRST)
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("tiny", Tiny)
async def test_a_turn_reuses_what_requests_computed_before_their_engine_was_known(
    build, tmp_path, monkeypatch, path, tiny
):
    monkeypatch.setattr("slotkeeper.runtime.engines.LEAST_WAIT", 0.1)
    computed = []
    (tmp_path / "ours").mkdir()
    (tmp_path / "stock").mkdir()
    more = {"tiny": tiny, "kind": build, "engine_wait": 0.2, "idle_tokens": 0}
    async with held_in_its_probe(tmp_path / "ours", monkeypatch, **more) as (engine, sidecar, _, goes_on):

        async def known() -> None:
            goes_on.set()
            await lab.ready(sidecar)
            await lab.rested(sidecar)
            computed.append(await lab.evaluated(engine.base))

        decisions = await turns(lab.url_of(sidecar), path, before_last=known)
        computed[0] = await lab.evaluated(engine.base) - computed[0]
    assert decisions[:3] == [Reason.NOT_PROBED] * 3
    assert decisions[3] in {Reason.CONTINUES, Reason.PREFIX, Reason.ENGINE_CHOSE}
    async with lab.tiny_engine(tiny, build, tmp_path / "stock") as engine:

        async def noted() -> None:
            computed.append(await lab.evaluated(engine.base))

        await turns(engine.base, path, before_last=noted)
        computed[1] = await lab.evaluated(engine.base) - computed[1]
    assert computed[0] <= computed[1], decisions


async def test_an_engine_that_freezes_during_its_probe_gets_no_request_and_serves_when_it_continues(
    tmp_path, monkeypatch
):
    frozen: dict[str, Any] = {"engine_frozen_after": 1.0}
    async with held_in_its_probe(tmp_path, monkeypatch, **frozen) as (engine, sidecar, client, goes_on):
        (link,) = sidecar.driver.links.values()
        pause(engine, signal.SIGSTOP)
        try:
            async with client.post(CHAT, json=said("Good day")) as answer:
                assert answer.status == 504
            assert link.pulse.frozen
            link.frozen_after = PATIENCE  # from now on a busy machine is no reason
        finally:
            pause(engine, signal.SIGCONT)
            goes_on.set()
        await lab.ready(sidecar)
        async with client.post(CHAT, json=said("Good day")) as answer:
            assert answer.status == 200
            assert answer.headers[DECISION] not in {Reason.NOT_PROBED, Reason.NO_ENGINE}


@pytest.mark.parametrize(
    ("flags", "key", "reason"),
    [
        (("--no-slots",), None, Reason.SLOTS_HIDDEN),
        (("--api-key", KEY), "another key", Reason.KEY_REFUSED),
    ],
)
async def test_a_request_that_cannot_be_placed_has_one_reason_everywhere(tmp_path, flags, key, reason):
    async with (
        lab.tiny_engine(Tiny.HYBRID, EngineKind.XLLAMACPP, tmp_path, *flags) as engine,
        running(settings_of(engine.base, engine_api_key=key)) as sidecar,
        aiohttp.ClientSession(lab.url_of(sidecar)) as client,
    ):
        (link,) = sidecar.driver.links.values()
        headers = {"Authorization": f"Bearer {KEY}"} if key else {}
        async with client.post(CHAT, json=said("Good day"), headers=headers) as answer:
            assert (answer.status, answer.headers[DECISION]) == (200, reason)
            asked = answer.headers["X-Request-Id"]
        await until(lambda: link.obstacle is reason)
        value = sidecar.metrics.registry.get_sample_value
        for name in ("decisions", "fallbacks"):
            assert value(f"slotkeeper_{name}_total", {"reason": reason.value}) == 1
        admin = f"http://{sidecar.addresses[1]}"
        assert f'"{reason.value}"' in (await status_of(client, f"{admin}/api/requests/{asked}"))[1]
        status, text = await status_of(client, f"{admin}/readyz")
        assert (status, "unplaced" in text) == (200, True), "no other request could ever come"
        kept_for_a_key = len(sidecar.driver.effect_runner.late_renders)
        assert kept_for_a_key == (reason is Reason.KEY_REFUSED), "an engine without slots is never known"
