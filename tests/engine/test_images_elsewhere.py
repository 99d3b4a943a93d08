"""Prompts with images on several engines, in a shared store, of several keys, and with an MTP block.

The cases with one engine, one sidecar and one key are in test_images.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from benchmarks.projectors import image

from builds import OLDER
from compatibility import Feature
from engine.test_images import (
    AROUND,
    MORE,
    PAIRS,
    QUESTIONS,
    SYSTEM,
    A,
    Asked,
    B,
    Viewer,
    engine_with,
    viewing,
    words,
)
from patience import PATIENCE
from slotkeeper.bench import lab
from slotkeeper.scheduler.snapshots import retention
from slotkeeper.scheduler.types import EngineId, Tier

pytestmark = pytest.mark.one_in(8)

LONG: Final = SYSTEM * 3
LEAST: Final = 2000  # tokens of LONG that a state covers
KEYS: Final = {name: {"Authorization": f"Bearer a-long-key-of-{name}"} for name in ("ann", "bob", "cid")}


def patient(client: Viewer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the sidecar wait for the shared store as if computing took very long, on a busy machine too."""
    for name in ("LEAST_SECONDS", "MOST_SECONDS"):
        monkeypatch.setattr(retention, name, PATIENCE)
    for table in client.sidecar.driver.placement.tables.values():
        table.rates.prefill.mean = 1.0


async def uploaded(client: Viewer) -> None:
    """Wait until all states are saved and are in the shared store."""
    await lab.rested(client.sidecar)
    snapshots = client.sidecar.driver.snapshots
    assert snapshots is not None
    await snapshots.written()
    listing = snapshots.store.listing()
    assert any(kept.tokens.chunks for kept in listing)
    assert all(Tier.COLD in kept.tiers for kept in listing)


async def begun(client: Viewer, picture: bytes) -> list[dict[str, Any]]:
    """Ask two questions about an image, and return the conversation."""
    first = [image(picture), words(QUESTIONS[0])]
    one = await client.ask(*first, system=LONG)
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": one.text.partition("|")[2]},
    ]
    other = await client.ask(words(QUESTIONS[1]), before=chat, system=LONG)
    return [
        *chat,
        {"role": "user", "content": [words(QUESTIONS[1])]},
        {"role": "assistant", "content": other.text.partition("|")[2]},
    ]


async def expect_only_new_text(
    client: Viewer, chat: list[dict[str, Any]], question: str, *, build: str, pair: str
) -> None:
    """Ask a further question, and assert that it computes only the last reply and itself.

    Where files have no checkpoints, the slot goes back to its last message to be saved there, and loses the
    checkpoint behind it: then that message is computed too.
    """
    messages = 2 if build == OLDER and pair != "dense" else 1
    asked = await client.ask(words(question), before=chat, system=LONG)
    assert asked.computed <= await client.tokens_behind(asked.body, len(chat) - messages) + MORE


@asynccontextmanager
async def two_sidecars(*engines: tuple[str, int], build: str, folder: Path) -> AsyncIterator[list[Viewer]]:
    """Run sidecars, each with its engine (pair, seed) and its slot folder; only the store is shared."""
    cold: dict[str, Any] = {"cold_store": str(folder / "shared")}
    async with AsyncExitStack() as stack:
        viewers = []
        for name, (pair, seed) in zip(("one", "other"), engines, strict=True):
            (own := folder / name).mkdir()
            engine = await stack.enter_async_context(engine_with(pair, build, own, seed=seed))
            viewers.append(await stack.enter_async_context(viewing(engine, keeps=True, **cold)))
        yield viewers


@pytest.mark.parametrize("pair", PAIRS)
async def test_a_conversation_with_an_image_moves_through_the_shared_store(
    build, pair, tmp_path, monkeypatch
):
    async with two_sidecars((pair, 0), (pair, 0), build=build, folder=tmp_path) as viewers:
        first, second = viewers
        chat = await begun(first, A)
        await uploaded(first)
        patient(second, monkeypatch)
        await expect_only_new_text(second, chat, QUESTIONS[2], build=build, pair=pair)
        asked = await second.ask(image(B), words(QUESTIONS[0]), system=LONG)
        await expect_nothing_of_the_image(second, asked)
        for client in viewers:
            await client.expect_same_answers()


async def expect_nothing_of_the_image(client: Viewer, asked: Asked) -> None:
    """Assert that no more than the text before the image was reused."""
    assert asked.cached - asked.planted <= (await client.texts(asked.body))[0] + AROUND


async def test_with_another_projector_the_shared_store_gives_the_text_before_the_image_only(
    build, tmp_path, monkeypatch
):
    """Both sidecars know their projectors' files."""
    async with two_sidecars(("dense", 0), ("dense", 1), build=build, folder=tmp_path) as viewers:
        first, second = viewers
        chat = await begun(first, A)
        await uploaded(first)
        patient(second, monkeypatch)
        asked = await second.ask(words(QUESTIONS[2]), before=chat, system=LONG)
        assert asked.cached - asked.planted > LEAST
        await expect_nothing_of_the_image(second, asked)
        await second.expect_same_answers()


@asynccontextmanager
async def two_engines(
    pair: str, build: str, folder: Path
) -> AsyncIterator[tuple[Viewer, dict[str, lab.Restartable]]]:
    """Run a sidecar with two engines that share a slot folder."""
    (slots := folder / "slots").mkdir(mode=0o700)
    async with AsyncExitStack() as stack:
        engines = {}
        for name in ("left", "right"):
            (own := folder / name).mkdir()
            engines[name] = await stack.enter_async_context(
                engine_with(pair, build, own, "--slot-save-path", str(slots))
            )
        upstream = tuple(f"{name}={engine.base}" for name, engine in engines.items())
        left = engines["left"]
        shared: dict[str, Any] = {"upstream": upstream, "slot_dir": slots, "save_pause": lab.PAUSE_SECONDS}
        client = await stack.enter_async_context(viewing(left, told=False, read_flags=True, **shared))
        yield client, engines


@pytest.mark.shows(Feature.MOVES)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("way", ["drained", "killed"])
async def test_a_conversation_with_an_image_goes_on_at_the_other_engine(build, pair, way, tmp_path):
    async with two_engines(pair, build, tmp_path) as (client, engines):
        chat = await begun(client, A)
        await lab.rested(client.sidecar)
        home = next(iter(client.sidecar.driver.journal)).engine
        assert home in engines
        if way == "drained":
            driver = client.sidecar.driver
            driver.membership.drain(driver.links[EngineId(home)], drain=True)
        else:
            engines[home].kill()
        client.engine = next(engine for name, engine in engines.items() if name != home)
        await expect_only_new_text(client, chat, QUESTIONS[2], build=build, pair=pair)
        assert next(iter(client.sidecar.driver.journal)).engine != home
        await client.expect_same_answers()


@pytest.mark.parametrize("ram_cache", ["0", "256"])
@pytest.mark.parametrize("pair", ["dense", "hybrid"])
async def test_an_image_of_another_key_is_computed_in_full(build, pair, ram_cache, tmp_path):
    """Nothing of slots, the RAM cache or, after a restart, files is reused; the first key reuses its own."""
    keys = ["--api-key", ",".join(key["Authorization"].split()[1] for key in KEYS.values())]
    apart: dict[str, Any] = {"engine_api_key": KEYS["ann"]["Authorization"].split()[1], "namespaces": "key"}
    async with (
        engine_with(pair, build, tmp_path, *keys, "--cache-ram", ram_cache) as engine,
        viewing(engine, keeps=True, **apart) as client,
    ):
        client.session.headers.update(KEYS["ann"])
        chat = await begun(client, A)
        await lab.rested(client.sidecar)
        for other in ("bob", "cid"):
            client.session.headers.update(KEYS[other])
            asked = await client.ask(image(A), words(QUESTIONS[0]), system=LONG)
            assert (asked.decision, asked.cached) == ("cold", asked.planted)
            await lab.rested(client.sidecar)
            client.session.headers.update(KEYS["ann"])
            await expect_only_new_text(client, chat, QUESTIONS[2], build=build, pair=pair)
            await lab.rested(client.sidecar)
            await lab.restarted(engine, client.sidecar)
