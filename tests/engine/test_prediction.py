"""The shadow predicts the engine's reuse before each request; the engine's own number must agree.

Conversations are random: turns, edits, branches and regenerations in two slots, files saved and restored.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import pytest

from compatibility import Feature
from engine.lockstep import LockStep
from engine.walks import Chats, Walk
from slotkeeper.api.head import PREDICTED
from slotkeeper.bench import lab
from slotkeeper.engine.client import EngineClient

pytestmark = pytest.mark.one_in(8)

REQUESTS = 150
CHATS = 60
FLAGS = ["-c", "8192", "-b", "512", "-ub", "128"]  # small batches: many checkpoints, cheap prompts


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
    """Play chats in two slots, without replies."""
    async with lockstep(engine) as step:
        step.opens, walk = True, Chats(random.Random(seed))
        while len(step.asked) < CHATS:
            note, number = walk.next()
            await step.chat(number % 2, walk.chats[number], note=note)
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


@pytest.mark.shows(Feature.PREDICTED)
@pytest.mark.parametrize(("model", "args"), MEMORIES.values(), ids=MEMORIES)
async def test_the_engines_reuse_is_predicted_before_each_request(engine_factory, build, model, args):
    engine = engine_factory(model, build, args=[*FLAGS, *args.split()])
    expect_known(await walk(engine, seed=11))


@pytest.mark.parametrize(("model", "args"), OTHER_FLAGS.values(), ids=OTHER_FLAGS)
async def test_the_engines_reuse_is_predicted_with_other_flags(engine_factory, build, model, args):
    engine = engine_factory(model, build, args=[*FLAGS, *args.split()])
    expect_known(await walk(engine, seed=11, requests=100))


@pytest.mark.parametrize(
    ("model", "args"),
    [("tiny-hybrid", ""), ("tiny-hybrid", "-cms 300"), ("tiny-recurrent", "--ctx-checkpoints 8")],
    ids=["hybrid", "hybrid, small step", "recurrent, short list"],
)
async def test_the_engines_reuse_is_predicted_in_chats_with_checkpoints_at_user_messages(
    engine_factory, build, model, args
):
    engine = engine_factory(model, build, args=[*FLAGS, *args.split()])
    expect_known(await chats(engine, seed=11))


@pytest.mark.parametrize("model", ["tiny-dense", "tiny-swa", "tiny-hybrid"])
async def test_unknown_tokens_of_a_reply_are_never_predicted_as_reused(engine_factory, build, model):
    engine = engine_factory(model, build, args=[*FLAGS, "--cache-ram", "0"])
    step = await walk(engine, seed=11, requests=40, learns=False, crowd=2)
    assert [str(one) for one in step.asked if one.reuse_plan.reuse > one.cached] == []
    assert any(one.reuse_plan.reuse < one.cached for one in step.asked)


@pytest.mark.parametrize(
    ("model", "args"), [("tiny-hybrid", ""), ("tiny-hybrid-mtp", "--spec-type draft-mtp")]
)
async def test_the_sidecar_never_predicts_more_tokens_than_are_reused(engine_factory, build, model, args):
    """Replies may come back changed, and drafts may follow after their ends."""
    engine = engine_factory(model, build, args=[*FLAGS, *args.split()])
    promises = await answered(engine, seed=11, requests=30)
    assert [one for one in promises if one.predicted > one.cached] == []
    assert sum(one.predicted == one.cached > 0 for one in promises) > len(promises) / 2


@dataclass(frozen=True, slots=True)
class Promise:
    predicted: int
    cached: int


async def answered(engine, seed: int, requests: int) -> list[Promise]:
    """Play chats with real replies, which go back to the sidecar unchanged.

    Nothing is computed in pauses: how long these are is the machine's affair. An answer that begins before
    its prompt was rendered has no prediction.
    """
    walk, promises = Chats(random.Random(seed)), list[Promise]()
    sidecar = lab.sidecar(engine.base, engine.flags, idle_tokens=0)
    async with sidecar as url, aiohttp.ClientSession(url) as session:
        while len(promises) < requests:
            _, number = walk.next()
            messages = walk.chats[number]
            body = {"messages": messages, "max_tokens": 40, "temperature": 0}
            async with session.post("/v1/chat/completions", json=body) as response:
                answer = await response.json()
            messages.append(answer["choices"][0]["message"])
            if PREDICTED in response.headers:
                promises.append(Promise(int(response.headers[PREDICTED]), answer["timings"]["cache_n"]))
    return promises


def expect_known(step: LockStep) -> None:
    """For all but one request in a hundred the engine reused exactly the predicted tokens."""
    misses, total = step.misses(), len(step.asked)
    assert len(misses) <= total / 100, f"{len(misses)} of {total} were wrong:\n" + "\n".join(map(str, misses))
