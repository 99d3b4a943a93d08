"""Libraries that programs use: what they get through us is what they get from the engine itself."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from builds import BUILDS, NEWER
from chaos.raw import until_async
from clients.conftest import LIBRARIES, Leg, begun, end, line, our_leg, ran, stock_leg
from slotkeeper.bench import lab

pytestmark = pytest.mark.clients


async def used(name: str, leg: Leg, home: Path) -> dict[str, Any]:
    """Return what a library gets, by the name of what it was asked for."""
    ended = await ran(line(name, leg), home)
    assert ended.code == 0, ended
    return json.loads(ended.out)


def errors(results: dict[str, Any]) -> int:
    return sum(isinstance(result, dict) and "error" in result for result in results.values())


@pytest.mark.parametrize("kind", BUILDS)
@pytest.mark.parametrize("name", LIBRARIES)
async def test_a_library_gets_what_it_gets_from_the_engine(name, kind, home, tmp_path, measured):
    async with stock_leg(kind, tmp_path / "stock") as stock, our_leg(kind, tmp_path / "ours") as ours:
        before = [await leg.evaluated() for leg in (stock, ours)]
        direct = await used(name, stock, home)
        found = await used(name, ours, home)
        after = [await leg.evaluated() for leg in (stock, ours)]
        idle = lab.spent(ours.sidecar).idle
    measured(
        name,
        stock,
        case="all calls",
        errors_ours=errors(found),
        errors_stock=errors(direct),
        tokens_ours=after[1] - before[1],
        tokens_stock=after[0] - before[0],
        idle_tokens=idle,
    )
    assert found == direct


async def test_libraries_try_again_until_a_killed_engine_is_back(home, tmp_path):
    async with our_leg(NEWER, tmp_path / "ours") as ours:
        ours.engine.kill()
        async with begun(line("retries", ours), home) as process:
            await process.stderr.readline()  # its libraries are loaded
            await ours.restarted()
            ended = await end(process)
    assert json.loads(ended.out) == {"openai": "stop", "anthropic": "end_turn"}


@pytest.mark.parametrize("kind", BUILDS)
async def test_ctrl_c_in_an_answer_frees_the_slot(kind, home, tmp_path):
    async with our_leg(kind, tmp_path / "ours") as ours:
        async with begun(line("endless", ours), home) as process:
            await until_async(ours.busy)
            process.send_signal(signal.SIGINT)
            assert (await end(process)).code != 0
        await until_async(ours.idle)
        assert (await used("retries", ours, home)) == {"openai": "stop", "anthropic": "end_turn"}


@pytest.mark.parametrize("kind", BUILDS)
async def test_clients_that_wait_hear_of_it_and_get_their_answers(kind, home, tmp_path):
    """One request may run, of two slots. A comment is no event: the libraries read over it."""
    async with our_leg(kind, tmp_path / "ours", max_running=1) as ours:
        heard = await used("waits", ours, home)
    assert heard == {
        "openai": ["queued", 1, "running", "length"],
        "anthropic": ["message_start", "message_stop", True],
    }
