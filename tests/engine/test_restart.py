"""Engines and sidecars that end and come back: what was computed before is not computed again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.bench.lab import Restartable
from slotkeeper.bench.measure import Oracle, Sample, Totals, totals
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.models import build as build_model
from slotkeeper.bench.play import play
from slotkeeper.bench.restart import Change, Conversation
from slotkeeper.bench.target import Target
from slotkeeper.engine.launch import find_engine

MODELS = [str(tiny) for tiny in Tiny]
CHANGES = list(Change)
CONTEXT = 8192  # tokens
PAUSE = 0.05  # seconds: the tests wait for every save
LONG_PAUSE = 3600.0  # nothing is saved but at the end
MORE = 1.05  # times the oracle may be computed
EACH = 64  # tokens, and so many more for each conversation


@asynccontextmanager
async def an_engine(model: str, build: str, folder: Path) -> AsyncIterator[Restartable]:
    slots = folder / "slots"
    slots.mkdir()
    binary = find_engine(build)
    flags = lab.stock_flags(binary, build_model(Tiny(model)), slots, context_tokens=CONTEXT)
    drafts = ["--spec-type", "draft-mtp"] if model == Tiny.HYBRID_MTP else []
    async with lab.restartable(binary, [*flags, *drafts], folder / "log") as engine:
        yield engine


@asynccontextmanager
async def a_sidecar(engine: Restartable, pause: float = PAUSE, **more: object) -> AsyncIterator[Sidecar]:
    slot_dir = engine.flags.slot_save_path
    async with lab.in_front_of(
        engine.base, engine.flags, slot_dir=slot_dir, save_pause=pause, **more
    ) as sidecar:
        yield sidecar


def two(change: Change) -> list[Conversation]:
    return [Conversation(number=number, change=change) for number in (1, 2)]


async def begin(chats: Sequence[Conversation], target: Target) -> None:
    for chat in chats:
        expect_answered(await play(chat.begin(), target, session=f"chat {chat.number}"))


async def go_on(chats: Sequence[Conversation], target: Target) -> Totals:
    found = []
    for chat in chats:
        found += await play(chat.go_on(), target, session=f"chat {chat.number}")
    expect_answered(found)
    return totals(found)


def expect_answered(samples: Sequence[Sample]) -> None:
    assert [sample.failure for sample in samples if sample.failure] == []
    assert all(sample.exact for sample in samples)


def expect_little_more_than_the_oracle(found: Totals, conversations: int = 2) -> None:
    assert found.oracle > 0
    assert found.computed <= MORE * found.oracle + EACH * conversations


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("model", MODELS)
async def test_an_engine_that_was_killed_computes_only_what_is_new(model, build, change, tmp_path):
    chats = two(change)
    async with an_engine(model, build, tmp_path) as engine, a_sidecar(engine) as sidecar:
        async with Target(lab.url_of(sidecar)) as target:
            await begin(chats, target)
            await lab.rested(sidecar)
            await engine.restart()
            found = await go_on(chats, target)
    print(f"FIGURES {build} {model} {change}: computed {found.computed} oracle {found.oracle}")
    expect_little_more_than_the_oracle(found)


@pytest.mark.parametrize("model", [Tiny.DENSE, Tiny.HYBRID])
async def test_without_a_sidecar_all_of_it_is_computed_again(model, build, tmp_path):
    chats = two(Change.APPEND)
    async with an_engine(model, build, tmp_path) as engine, Target(engine.base) as target:
        await begin(chats, target)
        await engine.restart()
        found = await go_on(chats, target)
    assert found.computed > 1.5 * found.oracle


@pytest.mark.parametrize("model", [Tiny.SWA, Tiny.HYBRID])
async def test_so_it_is_after_two_restarts(model, build, tmp_path):
    """The second time with nothing but files that were made after a restore."""
    chats = two(Change.APPEND)
    async with an_engine(model, build, tmp_path) as engine, a_sidecar(engine) as sidecar:
        async with Target(lab.url_of(sidecar)) as target:
            await begin(chats, target)
            for _ in range(2):
                await lab.rested(sidecar)
                await engine.restart()
                expect_little_more_than_the_oracle(await go_on(chats, target))


@pytest.mark.parametrize("also_the_engine", [False, True], ids=["sidecar", "both"])
@pytest.mark.parametrize("model", [Tiny.SWA, Tiny.HYBRID])
async def test_a_new_sidecar_finds_what_the_old_one_saved(model, build, also_the_engine, tmp_path):
    chats = two(Change.APPEND)
    async with an_engine(model, build, tmp_path) as engine:
        async with a_sidecar(engine) as sidecar, Target(lab.url_of(sidecar)) as target:
            await begin(chats, target)
            await lab.rested(sidecar)
        if also_the_engine:
            await engine.restart()
        async with a_sidecar(engine) as sidecar:
            found = await goes_on_at(sidecar, chats, target.oracle)
    expect_little_more_than_the_oracle(found)


@pytest.mark.parametrize("model", [Tiny.SWA, Tiny.HYBRID])
async def test_what_is_in_no_file_yet_is_saved_when_the_sidecar_is_stopped(model, build, tmp_path):
    """As at SIGTERM; then the engine goes too, as when a machine is shut down."""
    chats = two(Change.APPEND)
    async with an_engine(model, build, tmp_path) as engine:
        async with a_sidecar(engine, pause=LONG_PAUSE) as sidecar, Target(lab.url_of(sidecar)) as target:
            await begin(chats, target)
            assert not sidecar.driver.placement.shelf
            await sidecar.drain(delay=0)
            assert not sidecar.driver.placement.unsaved(sidecar.driver.now())
        await engine.restart()
        async with a_sidecar(engine) as sidecar:
            found = await goes_on_at(sidecar, chats, target.oracle)
    expect_little_more_than_the_oracle(found)


async def test_a_sidecar_that_vanished_before_it_could_save_has_lost_that(build, tmp_path):
    """What the tests above would show if nothing were saved."""
    chats = two(Change.APPEND)
    async with an_engine(Tiny.HYBRID, build, tmp_path) as engine:
        async with a_sidecar(engine, pause=LONG_PAUSE) as sidecar, Target(lab.url_of(sidecar)) as target:
            await begin(chats, target)
        await engine.restart()
        async with a_sidecar(engine) as sidecar:
            found = await goes_on_at(sidecar, chats, target.oracle)
    assert found.computed > 1.5 * found.oracle


async def goes_on_at(sidecar: Sidecar, chats: Sequence[Conversation], oracle: Oracle) -> Totals:
    """The same clients with a new sidecar."""
    async with Target(lab.url_of(sidecar)) as target:
        target.oracle = oracle
        return await go_on(chats, target)
