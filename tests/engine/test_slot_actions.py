"""Clients' own `POST /slots/N?action=...`: never with our files, never in a slot with a running answer."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final

import pytest

from chaos.raw import until
from engine.conftest import client_of, probed
from slotkeeper.bench import lab
from slotkeeper.bench.lab import rested
from slotkeeper.settings import Settings

STORY: Final = "The heron stood in the reeds and counted the frogs of the pond. " * 40
TALK: Final[dict[str, Any]] = {
    "messages": [{"role": "user", "content": STORY}],
    "max_tokens": 8,
    "temperature": 0,
}


def before(engine: Any, **more: Any) -> Settings:
    return lab.settings_of(
        upstream=(engine.base,),
        listen="127.0.0.1:0",
        admin_listen="127.0.0.1:0",
        slot_dir=engine.slot_dir,
        idle_tokens=0,
        save_pause=0.0,
        drain_timeout=1.0,
        **more,
    )


def contents(folder: Path) -> dict[str, str]:
    """Return the contents of our files, except the index, which the sidecar may write."""
    paths = [path for path in folder.glob("slotkeeper*.*") if "sqlite" not in path.name]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


async def test_a_client_can_neither_write_nor_read_the_sidecars_files(engine_factory, build):
    engine = engine_factory(build=build, args=["--cache-ram", "0"])
    async with probed(before(engine)) as sidecar, client_of(sidecar) as client:
        assert (await client.post("/v1/chat/completions", json=TALK)).status_code == 200
        await rested(sidecar)  # else the sidecar itself may write another file meanwhile
        store = sidecar.driver.snapshots.store
        was = contents(engine.slot_dir)
        kept = store.listing()[0].id
        names = ["slotkeeper.sqlite", "Slotkeeper.SQLITE", "\u017flotkeeper.sqlite", "slotkeeper.lock"]
        names += [f"{kept}.json", f"{kept}.slot"]
        for action in ("save", "restore"):
            for name in names:
                answer = await client.post(f"/slots/0?action={action}", json={"filename": name})
                assert answer.status_code == 400
                assert "choose another name" in answer.json()["error"]["message"]
        hidden = b'{"filename": "mine", "filename": "slotkeeper.sqlite"}'
        for path in ("/slots/0?action=save", "/%73lots/0?action=save", "/slots/0?%61ction=%73ave"):
            assert (await client.post(path, content=hidden)).status_code == 400
        for path in ("/slots/0?action=erase&action=save", "/slots/0x?action=save", "/slots/-1?action=erase"):
            assert (await client.post(path, json={"filename": "mine"})).status_code == 400
        assert contents(engine.slot_dir) == was
        assert (engine.slot_dir / "slotkeeper.sqlite").read_bytes().startswith(b"SQLite format 3")
        await store.verify(kept)


async def test_a_client_can_restore_a_conversation_from_its_own_file(engine_factory, build):
    engine = engine_factory("tiny-dense", build, args=["--cache-ram", "0", "-np", "1"])
    async with probed(before(engine, probe=False)) as sidecar, client_of(sidecar) as client:
        first = await client.post("/v1/chat/completions", json=TALK)
        reply = first.json()["choices"][0]["message"]["content"]
        for action in ("save", "erase", "restore"):
            answer = await client.post(f"/slots/0?action={action}", json={"filename": "mine"})
            assert answer.status_code == 200, answer.text
            held = sidecar.driver.placement.tables[engine.base].shadow.slots[0]
            assert (held is None) is (action == "erase")
        assert held.total == answer.json()["n_restored"]
        more = [{"role": "assistant", "content": reply}, {"role": "user", "content": "And then?"}]
        talk = {**TALK, "messages": [*TALK["messages"], *more]}
        answer = await client.post("/v1/chat/completions", json=talk)
        assert answer.status_code == 200
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 500


@pytest.mark.parametrize("action", ["save", "erase"])
async def test_a_slot_action_waits_for_the_answer_that_runs_in_its_slot(engine, action):
    async with probed(before(engine)) as sidecar, client_of(sidecar) as client:
        ask = {"prompt": STORY, "n_predict": 50_000, "id_slot": 0, "stream": True, "ignore_eos": True}
        done: list[int] = []

        async def act() -> None:
            answer = await client.post(f"/slots/0?action={action}", json={"filename": "mine"})
            done.append(answer.status_code)

        async with client.stream("POST", "/completion", json=ask) as answer:
            await anext(answer.aiter_lines())
            acting = sidecar.driver.tasks.start(act())
            await until(lambda: sidecar.driver.placement.queued == 1, "it waits in our line")
            assert done == []
        await acting
        assert done == [200]
