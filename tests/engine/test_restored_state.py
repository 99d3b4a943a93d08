"""A restored slot has its old state: the answers are those of a fresh computation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx
import pytest
from benchmarks.sessions import user

from compatibility import Feature
from engine.conftest import client_of
from patience import PATIENCE
from slotkeeper.api.document import Doc
from slotkeeper.api.head import DECISION
from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.bench.lab import Restartable
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.target import PLAIN
from slotkeeper.bench.texts import edited, prose, system
from slotkeeper.engine.child.launch import EngineKind
from slotkeeper.runtime import slot_files
from slotkeeper.scheduler.slots.engine_model import Snapshot
from slotkeeper.scheduler.types import Reason

pytestmark = pytest.mark.one_in(8)

CHAT = "/v1/chat/completions"
SAID = 24  # tokens of each answer
COMPARED = 4  # first tokens whose logprobs are compared
NOISE = 0.05  # of a logprob: what a different division into batches changes


class Answer(NamedTuple):
    messages: tuple[Doc, ...]
    reply: Doc
    logprobs: list[float]
    cached: int
    decision: str


@asynccontextmanager
async def a_sidecar(engine: Restartable) -> AsyncIterator[tuple[Sidecar, httpx.AsyncClient]]:
    async with (
        lab.keeping(engine) as sidecar,
        client_of(sidecar) as client,
    ):
        yield sidecar, client


async def ask(client: httpx.AsyncClient, messages: Sequence[Doc], **more: Any) -> Answer:
    fixed = {"messages": list(messages), "max_tokens": SAID, "temperature": 0}
    probed = {"logprobs": True, "top_logprobs": 3}
    response = await client.post(CHAT, json={**fixed, **probed, **PLAIN, **more})
    assert response.status_code == 200, response.text
    doc = response.json()
    (choice,) = doc["choices"]
    return Answer(
        tuple(messages),
        choice["message"],
        [
            top["logprob"]
            for token in choice["logprobs"]["content"][:COMPARED]
            for top in token["top_logprobs"]
        ],
        doc["timings"]["cache_n"],
        response.headers.get(DECISION, "").partition(";")[0],
    )


async def chat(client: httpx.AsyncClient, sidecar: Sidecar, turns: int) -> list[Doc]:
    """Play a conversation that pauses after each turn for long enough to be saved."""
    history = [system(prose(3000, 5))]
    for number in range(turns):
        history.append(user(number))
        history.append((await ask(client, history)).reply)
        await lab.rested(sidecar)
    return history


async def expect_as_fresh(engine: Restartable, answers: Sequence[Answer]) -> None:
    """Ask the engine itself, which computes the whole prompt."""
    async with httpx.AsyncClient(base_url=engine.base, timeout=PATIENCE) as client:
        for answer in answers:
            fresh = await ask(client, answer.messages, cache_prompt=False)
            assert fresh.cached == 0
            assert answer.reply == fresh.reply
            assert answer.logprobs == pytest.approx(fresh.logprobs, abs=NOISE)


@pytest.mark.shows(Feature.SAME)
@pytest.mark.parametrize("model", Tiny)
async def test_answers_after_a_restore_equal_those_of_a_fresh_computation(model, build, tmp_path):
    async with lab.tiny_engine(model, build, tmp_path) as engine:
        async with a_sidecar(engine) as (sidecar, client):
            history = await chat(client, sidecar, turns=3)
            catalog = sidecar.driver.placement.catalog
            assert all(snapshot.repaired is (model == Tiny.SWA) for snapshot in catalog)
            prompts = {
                "extended": [*history, user(7)],
                "said again": history[:-1],
                "last message edited": edited(history[:-1], -1, "In other words. " + prose(1500, 90)),
                "second message edited": edited(history[:4], 3, "In other words. " + prose(1500, 91)),
            }
            answers = {}
            for name, messages in prompts.items():
                await lab.restarted(engine, sidecar)
                answers[name] = await ask(client, messages)
                await lab.rested(sidecar)
        # Files of older builds carry no draft state: an idle prefill of the file's tokens may be first.
        warmed = {Reason.PREFIX} if model == Tiny.HYBRID_MTP else set()
        assert {answer.decision for answer in answers.values()} <= {Reason.SNAPSHOT, *warmed}
        await expect_as_fresh(engine, list(answers.values()))


async def test_a_file_with_fewer_checkpoints_restores_the_same_state(tmp_path, monkeypatch):
    """The engine keeps six, which are of the last two turns."""
    made = spied(monkeypatch)
    async with lab.tiny_engine(
        Tiny.HYBRID, EngineKind.XLLAMACPP, tmp_path, "--ctx-checkpoints", "6", "-cms", "0"
    ) as engine:
        async with a_sidecar(engine) as (sidecar, client):
            history = await chat(client, sidecar, turns=3)
            last = await only_the_longest(sidecar)
            answers = []
            for at in (3, 5):
                await lab.restarted(engine, sidecar)
                text = "In other words. " + prose(1500, 90 + at)
                answers.append(await ask(client, edited(history[: at + 1], at, text)))
        await expect_as_fresh(engine, answers)
    assert any(file.kept < file.had for file in made)
    assert answers[-1].cached in last.checkpoints


def longest(sidecar: Sidecar) -> Snapshot:
    return max(sidecar.driver.placement.catalog, key=lambda snapshot: len(snapshot.tokens))


async def only_the_longest(sidecar: Sidecar) -> Snapshot:
    """Remove all other snapshots."""
    last = longest(sidecar)
    for other in [snapshot for snapshot in sidecar.driver.placement.catalog if snapshot is not last]:
        await sidecar.driver.snapshots.forget(other.id)
    return last


class Made(NamedTuple):
    """Checkpoints of a file: those that the engine wrote, and those that were kept in it."""

    had: int
    kept: int


def spied(monkeypatch: pytest.MonkeyPatch) -> list[Made]:
    """Treat every file as a large one, and record what is done to each."""
    made: list[Made] = []
    monkeypatch.setattr(slot_files, "LARGE", 0)

    def worth_keeping(file, places, stale):
        kept = found(file, places, stale)
        made.append(Made(len(file.records), len(kept)))
        return kept

    found = slot_files.worth_keeping
    monkeypatch.setattr(slot_files, "worth_keeping", worth_keeping)
    return made


async def test_a_restored_full_window_is_not_cut_where_its_cells_are_missing(build, tmp_path):
    """The engine itself would do that, and answer from the wrong window (engine.md T9)."""
    async with lab.tiny_engine(Tiny.SWA, build, tmp_path, "--swa-full", "-np", "1") as engine:
        async with a_sidecar(engine) as (sidecar, client):
            history = await chat(client, sidecar, turns=1)
            newest = await only_the_longest(sidecar)
            inside = edited(history[:-1], -1, history[-2]["content"][:-600])
            await lab.restarted(engine, sidecar)
            extended = await ask(client, [*history, user(7)])
            parted = await ask(client, inside)
        assert (extended.decision, extended.cached) == (Reason.SNAPSHOT, len(newest.tokens))
        assert parted.decision == Reason.COLD  # its cached tokens were planted for it
        await expect_as_fresh(engine, [extended, parted])

        name = f"{newest.id}.slot"
        async with httpx.AsyncClient(base_url=engine.base, timeout=PATIENCE) as direct:
            answer = await direct.post("/slots/0?action=restore", json={"filename": name})
            assert answer.json()["n_restored"] == len(newest.tokens)
            wrong, right = await ask(direct, inside), await ask(direct, inside, cache_prompt=False)
        assert wrong.cached > 0
        assert wrong.logprobs != pytest.approx(right.logprobs, abs=NOISE)
