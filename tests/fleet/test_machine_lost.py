"""A machine is lost in the middle of forty conversations: the other machine continues all of them."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp
import pytest

from chaos.lab_snapshots import CHAT, Talk, bench, undisturbed
from chaos.raw import until
from fleet.parts import beside
from fleet.servers import BUCKET
from fleet.test_moving import BUILD, MODEL

TALKS: Final = 40
TURNS: Final = 4
# characters: with these, computing a state takes longer than fetching it, on small models too
LEAD: Final = 12_000
# without the engine's own cache, which would hide losses
FLAGS: Final = ("-np", "4", "-c", "32768", "--cache-ram", "0")
READS: Final = 1.0  # seconds between two turns
PLANTED: Final = "X-Slotkeeper-Planted"
MOST: Final = 1.10  # greatest waited ratio


@dataclass(slots=True)
class Machine:
    """The machine that a gateway sends requests to; None after it is lost."""

    base: str
    answered: int = 0


@dataclass(slots=True)
class Sums:
    """Sums over all answers: tokens that their clients waited for, and new tokens."""

    waited: int = 0
    oracle: int = 0
    again: int = 0  # requests that were sent a second time, to the other machine
    restored: int = 0
    lost: list[int] = field(default_factory=list)  # tokens beyond the oracle, of each request that had any


async def play(talk: Talk, machines: list[Machine], home: int, sums: Sums) -> None:
    """Play all turns of one conversation on its home machine, or on the other one after that is lost."""
    held = 0
    async with aiohttp.ClientSession() as client:
        while talk.turn < TURNS:
            machine = machines[home] if home < len(machines) else machines[0]
            try:
                async with client.post(machine.base + CHAT, json=talk.body(talk.turn)) as answer:
                    assert answer.status == 200, await answer.text()
                    said, planted = await answer.json(), int(answer.headers.get(PLANTED, "0"))
            except (aiohttp.ClientError, OSError):
                assert machine not in machines, "only a machine that is lost may break off"
                sums.again += 1
                continue
            assert said["choices"][0]["message"] == talk.replies[talk.turn], f"talk {talk.number} differs"
            machine.answered += 1
            talk.turn += 1
            computed = said["timings"]["prompt_n"] + planted
            new = said["usage"]["prompt_tokens"] - held
            held = said["usage"]["prompt_tokens"] + said["usage"]["completion_tokens"]
            sums.waited += computed
            sums.oracle += new
            if computed > new:
                sums.lost.append(computed - new)
            await asyncio.sleep(READS)  # the time that a user reads


@pytest.mark.fleet
async def test_conversations_of_a_killed_machine_continue_on_the_other_machine(
    s3: str, redis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    key = tmp_path / "key"
    key.write_text("k" * 64)
    shared = ["--cold-store", f"s3://{BUCKET}/lost", "--hints", redis, "--store-key-file", str(key)]
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(bench(MODEL, BUILD, tmp_path / "one", *FLAGS))
        other = await stack.enter_async_context(bench(MODEL, BUILD, tmp_path / "other", *FLAGS))
        talks = await undisturbed(one, TALKS, turns=TURNS, lead=LEAD)
        sidecars = [
            stack.enter_context(
                beside(each.base, each.folder / "sidecar.log", "--slot-dir", str(each.slots), *shared)
            )
            for each in (other, one)
        ]
        machines = [Machine(f"http://{data}") for _, data, _ in sidecars]
        sums, doomed, process = Sums(), machines[1], sidecars[1][0]
        async with asyncio.TaskGroup() as group:
            for talk in talks:
                group.create_task(play(talk, machines, talk.number % 2, sums))
            await until(lambda: doomed.answered >= TALKS, "half of its turns are done")
            machines.remove(doomed)
            process.kill()
            one.kill()
        assert all(talk.turn == TURNS for talk in talks)
        figures = f"waited {sums.waited}, oracle {sums.oracle}, sent again {sums.again}, beyond {sums.lost}"
        assert sums.waited <= MOST * sums.oracle, figures
        record(figures)


def record(figures: str) -> None:
    """Write the figures for a person who runs pytest -s."""
    sys.stderr.write(figures + "\n")
