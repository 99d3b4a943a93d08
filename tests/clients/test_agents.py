"""Agents that people use: through us they end as with the engine itself, and cost it no more tokens."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from builds import BUILDS, NEWER
from chaos.raw import until_async
from clients.agents import AGENTS_BY_NAME, WORK, Agent, acting, takes_turn, words
from clients.conftest import Ended, Leg, begun, end, our_leg, stock_leg
from slotkeeper.bench import lab

pytestmark = pytest.mark.clients

TASKS: Final = ("Say hello.", "Say it in other words.", "Say goodbye.")
AT_MOST: Final = 1.005  # times the tokens that the engine evaluates without us
AFTER_RESTART: Final = 1.05  # times those of an engine that was not restarted
QUICK: Final = ("llm", "pi", "codex", "aider", "open-webui", "pi-litellm")  # they start within seconds
SLOW: Final = {"opencode": 2, "claude-code": 2, "qwen-code": 2, "cline": 3}  # turns
AT_ONCE: Final = (QUICK[:3], QUICK[3:])


async def converses(agent: Agent, leg: Leg, home: Path, turns: int) -> tuple[list[Ended], int]:
    """Take turns in a new home at the same path; return the failed ones, and the tokens of the engine."""
    shutil.rmtree(home)
    before = await leg.evaluated()
    async with acting(agent, leg, home):
        ended = [await takes_turn(agent, home, turn, TASKS[turn]) for turn in range(turns)]
    failed = [one for one in ended if one.code != 0 or not one.out.strip()]
    return failed, await leg.evaluated() - before


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, *kind.values, marks=kind.marks, id=f"{name}-{kind.id}")
        for name in QUICK
        for kind in BUILDS
    ]
    + [(name, NEWER) for name in SLOW],
)
async def test_an_agent_costs_no_more_than_with_the_engine_alone(name, kind, home, tmp_path, measured):
    agent = AGENTS_BY_NAME[name]
    turns = SLOW.get(name, 3)
    words(agent, 0, "")
    client, case = agent.row
    async with stock_leg(kind, tmp_path / "stock") as stock, our_leg(kind, tmp_path / "ours") as ours:
        failed_stock, tokens_stock = await converses(agent, stock, home, turns)
        failed_ours, tokens_ours = await converses(agent, ours, home, turns)
        idle = lab.spent(ours.sidecar).idle
    measured(
        client,
        stock,
        case=f"{case}{turns} turns",
        errors_ours=len(failed_ours),
        errors_stock=len(failed_stock),
        tokens_ours=tokens_ours,
        tokens_stock=tokens_stock,
        idle_tokens=idle,
    )
    assert (failed_ours, failed_stock) == ([], [])
    # An older build has no checkpoints in its files: in a long pause we compute some 1,200 tokens anew.
    counted = tokens_ours if kind == NEWER else tokens_ours - idle
    assert counted <= AT_MOST * tokens_stock


@pytest.mark.parametrize("kind", BUILDS)
@pytest.mark.parametrize("name", QUICK[1:])  # the prompts of llm are too short to be saved
async def test_a_kill_of_sidecar_and_engine_between_two_turns_costs_little(
    name, kind, home, tmp_path, measured
):
    """The least possible are the tokens of an engine alone that was not killed."""
    agent = AGENTS_BY_NAME[name]
    words(agent, 0, "")
    client, case = agent.row
    async with stock_leg(kind, tmp_path / "stock") as stock:
        failed_stock, least = await converses(agent, stock, home, 2)
    shutil.rmtree(home)
    ended, tokens = list[Ended](), 0
    async with stock_leg(kind, tmp_path / "ours") as behind:
        for turn in range(2):
            before = await behind.evaluated()
            log = tmp_path / f"{turn}.log"
            folder = ("--slot-dir", str(behind.engine.flags.slot_save_path))
            with log.open("wb") as output:
                async with lab.served(behind.url, folder, output.fileno()) as served:
                    async with acting(agent, Leg(url=served.url, engine=behind.engine), home):
                        ended.append(await takes_turn(agent, home, turn, TASKS[turn]))
                    await until_async(partial(saved, log))
                    os.kill(served.pid, signal.SIGKILL)
            tokens += await behind.evaluated() - before
            await behind.restarted()
    measured(
        client,
        behind,
        case=f"{case}killed between 2 turns",
        errors_ours=sum(one.code != 0 for one in ended),
        errors_stock=len(failed_stock),
        tokens_ours=tokens,
        tokens_stock=least,
    )
    assert not any(one.code for one in ended), [str(one) for one in ended]
    assert tokens <= AFTER_RESTART * least


async def saved(log: Path) -> bool:
    """Return whether a slot was saved in the pause after the last request."""
    *_, after = log.read_text().rpartition('"event":"request"')  # noqa: ASYNC240 - a local disk
    return '"moment":"pause"' in after


@pytest.mark.parametrize("kind", BUILDS)
@pytest.mark.parametrize("names", AT_ONCE, ids=", ".join)
async def test_more_agents_than_slots_at_once(names, kind, home, tmp_path, measured):
    """Two clients of each kind share two slots."""
    agents = [AGENTS_BY_NAME[name] for name in names] * 2
    for agent in agents:
        words(agent, 0, "")

    async def greets(number: int) -> Ended:
        async with acting(agents[number], ours, home / str(number)):
            return await takes_turn(agents[number], home / str(number), 0, TASKS[0])

    async with our_leg(kind, tmp_path / "ours") as ours:
        ended = await asyncio.gather(*map(greets, range(len(agents))))
    failed = sum(one.code != 0 for one in ended)
    case = f"{len(agents)} of {', '.join(names)} at once on 2 slots"
    measured(agents[0].package, ours, case=case, errors_ours=failed)
    assert failed == 0, [str(one) for one in ended]


@pytest.mark.parametrize("kind", BUILDS)
@pytest.mark.parametrize("name", QUICK)
async def test_ctrl_c_in_a_turn_frees_the_slot(name, kind, home, tmp_path):
    """The engine's answers do not end until the context is full."""
    agent = AGENTS_BY_NAME[name]
    line = words(agent, 0, TASKS[0])
    async with (
        our_leg(kind, tmp_path / "ours", "--ignore-eos") as ours,
        acting(agent, ours, home),
        begun(line, home, agent.variables, cwd=home / WORK) as process,
    ):
        await until_async(ours.busy)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        await end(process)
        await until_async(ours.idle)
