"""`doctor --compare`: two engines that compute the same, and two that do not."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from builds import NEWER, OLDER, needs_older
from patience import PATIENCE
from slotkeeper.bench.models import Tiny
from slotkeeper.cli.main import main


async def compared(one, other, capsys) -> tuple[int, str]:
    code = await asyncio.to_thread(main, ["doctor", "--compare", one.base, other.base])
    return code, " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("model", [Tiny.DENSE, Tiny.HYBRID])
async def test_engines_that_differ_in_threads_share_snapshots(engine_factory, build, model, capsys):
    one, other = engine_factory(model, build), engine_factory(model, build, args=["-t", "2"])
    code, said = await compared(one, other, capsys)
    assert code == 0, said
    assert "64 of 64 tokens are the same" in said
    assert "They share snapshots" in said


@needs_older
@pytest.mark.parametrize("model", [Tiny.DENSE, Tiny.HYBRID])
async def test_two_builds_compute_the_same_values(engine_factory, model, capsys):
    """Their files have different versions, which each engine's own probe finds; the computed values agree."""
    code, said = await compared(engine_factory(model, OLDER), engine_factory(model, NEWER), capsys)
    assert "that is noise" in said, (code, said)


async def test_engines_with_other_slots_or_another_model_do_not_share_snapshots(
    engine_factory, build, capsys
):
    one = engine_factory(Tiny.DENSE, build)
    code, said = await compared(one, engine_factory(Tiny.DENSE, build, args=["-np", "3"]), capsys)
    assert (code, "give both the same -np" in said) == (1, True)
    code, said = await compared(one, engine_factory(Tiny.HYBRID, build), capsys)
    assert code == 1
    assert "They do not have the same model" in said
    assert "more than noise" in said


async def test_an_engine_that_was_used_is_not_compared(engine_factory, build, capsys):
    one, other = engine_factory(Tiny.DENSE, build), engine_factory(Tiny.DENSE, build)
    async with httpx.AsyncClient(base_url=other.base, timeout=PATIENCE) as client:
        (await client.post("/completion", json={"prompt": "Hello", "n_predict": 4})).raise_for_status()
    code, said = await compared(one, other, capsys)
    assert code == 1
    assert f"{other.base} has been used" in said
