"""A checkpoint one token after a cut survives it, though its last token has changed (engine.md T11)."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Final

import httpx
import pytest

from patience import PATIENCE
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny

NOISE: Final = 0.05  # of a logprob: what a different division into batches changes
CUT: Final = 300  # tokens
TAIL: Final = 4  # tokens after the last checkpoint of a prompt
ARGS: Final = ("-np", "1", "--checkpoint-min-step", "0")


def prompts() -> list[list[int]]:
    """Prompts with checkpoints at CUT and one token later; the third cuts between, the last continues it."""
    chance = random.Random(4)
    words = [chance.randrange(300, 900) for _ in range(4000)]
    first = words[: CUT + TAIL]
    second = [*words[: CUT + 2], *words[1000 : 1000 + TAIL - 1]]
    third = [*words[:CUT], *words[1100:2900]]  # so long that no checkpoint is made where it begins
    return [first, second, third, [*third[: CUT + 12], *words[3000:3008]]]


async def ask(client: httpx.AsyncClient, ids: list[int]) -> Mapping[int, float]:
    """Return the likeliest next tokens, and their logprobs."""
    body = {"prompt": ids, "n_predict": 1, "temperature": 0, "n_probs": 3}
    answer = await client.post("/completion", json=body, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    (word,) = answer.json()["completion_probabilities"]
    return {top["id"]: top["logprob"] for top in word["top_logprobs"]}


def same(one: Mapping[int, float], other: Mapping[int, float]) -> bool:
    return one.keys() == other.keys() and dict(one) == pytest.approx(dict(other), abs=NOISE)


async def fresh(engine: Any) -> Mapping[int, float]:
    """Return the last prompt's answer when all of it is computed."""
    async with httpx.AsyncClient(base_url=engine.base) as client:
        right = await ask(client, prompts()[-1])
    await engine.restart()
    return right


@pytest.mark.parametrize("restarts", [False, True], ids=["in the slot", "from a file"])
@pytest.mark.parametrize("model", [Tiny.HYBRID, Tiny.RECURRENT])
async def test_behind_the_sidecar_no_stale_checkpoint_is_used(model, build, restarts, tmp_path):
    async with lab.tiny_engine(model, build, tmp_path, *ARGS) as engine:
        right = await fresh(engine)
        async with lab.keeping(engine) as sidecar, httpx.AsyncClient(base_url=lab.url_of(sidecar)) as client:
            *before, last = prompts()
            for ids in before:
                await ask(client, ids)
            if restarts:
                await lab.rested(sidecar)
                await lab.restarted(engine, sidecar)
            assert same(await ask(client, last), right)
