"""The shadow says before each request what the engine will reuse: held against the engine's own number.

Conversations are random: turns, edits, branches and regenerations in two slots, files saved and restored.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from engine.lockstep import LockStep
from engine.walks import Chats, Walk
from slotkeeper.engine.client import EngineClient

REQUESTS = 150
CHATS = 60
FLAGS = ["-c", "8192", "-b", "512", "-ub", "128"]  # small batches: many checkpoints, prompts are cheap


@asynccontextmanager
async def lockstep(engine) -> AsyncIterator[LockStep]:
    async with EngineClient(engine.base) as client, aiohttp.ClientSession(engine.base) as session:
        yield await LockStep.begin(engine, client, session)


async def walk(
    engine, seed: int, *, requests: int = REQUESTS, learns: bool = True, crowd: int = 3
) -> LockStep:
    async with lockstep(engine) as step:
        await Walk(step, random.Random(seed), learns, crowd).run(requests)
        return step


async def chats(engine, seed: int) -> LockStep:
    async with lockstep(engine) as step:
        await Chats(step, random.Random(seed)).run(CHATS)
        return step


MEMORIES = {
    "dense": ("tiny-dense", ""),
    "swa": ("tiny-swa", ""),
    "swa-full": ("tiny-swa", "--swa-full"),
    "hybrid": ("tiny-hybrid", ""),
    "mtp": ("tiny-hybrid-mtp", "--spec-type draft-mtp"),
    "recurrent": ("tiny-recurrent", ""),
}
OTHER_FLAGS = {
    "hybrid, short list": ("tiny-hybrid", "--ctx-checkpoints 4"),
    "hybrid, no minimal step": ("tiny-hybrid", "-cms 0 -ub 256"),
    "swa, short list, no minimal step": ("tiny-swa", "--ctx-checkpoints 4 -cms 0"),
    "hybrid, no RAM cache": ("tiny-hybrid", "--cache-ram 0"),
    "swa, no RAM cache": ("tiny-swa", "--cache-ram 0 -ub 256"),
}


@pytest.mark.parametrize(("model", "args"), MEMORIES.values(), ids=MEMORIES)
async def test_what_the_engine_reuses_is_known_before(engine_factory, build, model, args):
    engine = engine_factory(model, build, args=[*FLAGS, *args.split()])
    expect_known(await walk(engine, seed=11))


@pytest.mark.parametrize(("model", "args"), OTHER_FLAGS.values(), ids=OTHER_FLAGS)
async def test_so_it_is_with_other_flags(engine_factory, build, model, args):
    engine = engine_factory(model, build, args=[*FLAGS, *args.split()])
    expect_known(await walk(engine, seed=11, requests=100))


@pytest.mark.parametrize(
    ("model", "args"),
    [("tiny-hybrid", ""), ("tiny-hybrid", "-cms 300"), ("tiny-recurrent", "--ctx-checkpoints 8")],
    ids=["hybrid", "hybrid, small step", "recurrent, short list"],
)
async def test_so_it_is_in_chats_whose_user_messages_get_checkpoints(engine_factory, build, model, args):
    engine = engine_factory(model, build, args=[*FLAGS, *args.split()])
    expect_known(await chats(engine, seed=11))


@pytest.mark.parametrize("model", ["tiny-dense", "tiny-swa", "tiny-hybrid"])
async def test_tokens_of_a_reply_that_is_not_known_are_not_promised(engine_factory, build, model):
    engine = engine_factory(model, build, args=[*FLAGS, "--cache-ram", "0"])
    step = await walk(engine, seed=11, requests=60, learns=False, crowd=2)
    assert [str(one) for one in step.asked if one.look.reuse > one.cached] == []
    assert any(one.look.reuse < one.cached for one in step.asked)


def expect_known(step: LockStep) -> None:
    """For all but one request in a hundred the engine reused just what was predicted."""
    misses, total = step.misses(), len(step.asked)
    assert len(misses) <= total / 100, f"{len(misses)} of {total} were wrong:\n" + "\n".join(map(str, misses))
