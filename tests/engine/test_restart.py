"""Engines and sidecars that end and come back: what was computed before is not computed again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from benchmarks.restarted_chat import Change, RestartedChat

from compatibility import Feature
from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.bench.measure import Oracle, Sample, Totals, totals
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.target import Target, Turn, play

pytestmark = pytest.mark.one_in(8)

LONG_PAUSE = 3600.0  # nothing is saved before the end
MORE = 1.05  # times the oracle may be computed
EACH = 64  # tokens more for each conversation


def two(change: Change) -> list[RestartedChat]:
    return [RestartedChat(number=number, change=change) for number in (1, 2)]


async def begin(chats: Sequence[RestartedChat], target: Target, sidecar: Sidecar | None = None) -> None:
    """Send the first turns of each chat. A sidecar saves all of a chat before the next one begins.

    A chat that begins while the slot of another is cut back for a file ends that work.
    """
    for chat in chats:
        expect_answered(await play(chat.begin(), target, session=f"chat {chat.number}"))
        if sidecar:
            await lab.rested(sidecar)


async def continue_chats(
    chats: Sequence[RestartedChat], target: Target, sidecar: Sidecar | None = None
) -> Totals:
    """Send turns as clients that think before each question, until the sidecar has saved everything.

    A client that asks at once may have to compute some more tokens, because its slot is just being saved.
    """

    async def thinks(_: Turn) -> None:
        if sidecar:
            await lab.rested(sidecar)

    found = []
    for chat in chats:
        found += await play(chat.go_on(), target, session=f"chat {chat.number}", before=thinks)
    expect_answered(found)
    return totals(found)


def expect_answered(samples: Sequence[Sample]) -> None:
    assert [sample.failure for sample in samples if sample.failure] == []
    assert all(sample.exact for sample in samples)


def expect_little_more_than_the_oracle(found: Totals, *, conversations: int = 2) -> None:
    assert found.oracle > 0
    assert found.computed <= MORE * found.oracle + EACH * conversations


@pytest.mark.shows(Feature.KILLED)
@pytest.mark.parametrize("change", Change)
@pytest.mark.parametrize("model", Tiny)
async def test_a_killed_engine_computes_only_new_tokens_after_its_restart(model, build, change, tmp_path):
    chats = two(change)
    async with lab.tiny_engine(model, build, tmp_path) as engine, lab.keeping(engine) as sidecar:
        async with Target(lab.url_of(sidecar)) as target:
            await begin(chats, target, sidecar)
            await lab.restarted(engine, sidecar)
            found = await continue_chats(chats, target, sidecar)
    expect_little_more_than_the_oracle(found)


async def test_after_two_restarts_the_engine_computes_only_new_tokens(build, tmp_path):
    """The second time from files of slots that were restored themselves."""
    chats = two(Change.APPEND)
    async with lab.tiny_engine(Tiny.SWA, build, tmp_path) as engine, lab.keeping(engine) as sidecar:
        async with Target(lab.url_of(sidecar)) as target:
            await begin(chats, target, sidecar)
            for _ in range(2):
                await lab.rested(sidecar)
                await lab.restarted(engine, sidecar)
                expect_little_more_than_the_oracle(await continue_chats(chats, target, sidecar))


@pytest.mark.shows(Feature.SIDECAR, Tiny.HYBRID)
@pytest.mark.parametrize("also_the_engine", [False, True], ids=["sidecar", "both"])
async def test_a_new_sidecar_restores_the_files_of_the_old_sidecar(build, also_the_engine, tmp_path):
    chats = two(Change.APPEND)
    async with lab.tiny_engine(Tiny.HYBRID, build, tmp_path) as engine:
        async with lab.keeping(engine) as sidecar, Target(lab.url_of(sidecar)) as target:
            await begin(chats, target, sidecar)
        if also_the_engine:
            await engine.restart()
        async with lab.keeping(engine) as sidecar:
            found = await continue_at(sidecar, chats, target.oracle)
    expect_little_more_than_the_oracle(found)


async def test_unsaved_slots_are_saved_when_the_sidecar_is_stopped(build, tmp_path):
    """As at SIGTERM; then the engine ends too, as when a machine is shut down."""
    chats = two(Change.APPEND)
    async with lab.tiny_engine(Tiny.SWA, build, tmp_path) as engine:
        async with (
            lab.keeping(engine, save_pause=LONG_PAUSE) as sidecar,
            Target(lab.url_of(sidecar)) as target,
        ):
            await begin(chats, target)
            # their common beginning is in a file, but not their own parts
            placement = sidecar.driver.placement
            ends = [held.total for table in placement.tables.values() for held in table.shadow.slots if held]
            assert all(len(snapshot.tokens) < min(ends) for snapshot in placement.catalog)
            await sidecar.drain(delay=0)
            assert not sidecar.driver.placement.unsaved(sidecar.driver.now())
        await engine.restart()
        async with lab.keeping(engine) as sidecar:
            found = await continue_at(sidecar, chats, target.oracle)
    expect_little_more_than_the_oracle(found)


async def continue_at(sidecar: Sidecar, chats: Sequence[RestartedChat], oracle: Oracle) -> Totals:
    """Continue the same clients with a new sidecar."""
    async with Target(lab.url_of(sidecar)) as target:
        target.oracle = oracle
        return await continue_chats(chats, target, sidecar)
