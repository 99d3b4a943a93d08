"""`slotkeeper snapshots`, and what the sidecar remembers of engines, with engines that save their slots."""

from __future__ import annotations

import json

import aiohttp
import pytest
from rich.console import Console

from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny
from slotkeeper.cli.snapshots import folder, running, snapshots

STORY = "The lighthouse keeper counts the ships that pass by night. " * 30
CHAT = {"messages": [{"role": "user", "content": STORY}], "max_tokens": 8, "temperature": 0}


@pytest.fixture
def command(capsys):
    """Run a command; return its exit code and all lines."""

    async def run(action: str, *words: str, opening) -> tuple[int, list[dict]]:
        capsys.readouterr()  # the sidecar's own log
        code = await snapshots(action, words, opening, Console(), as_json=True)
        return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


def admin_of(sidecar: Sidecar):
    return running(f"http://{sidecar.addresses[1]}", None)


async def say(sidecar: Sidecar) -> tuple[str, int]:
    """Send the same request; return its slot, and the tokens that the engine reused."""
    async with aiohttp.ClientSession(lab.url_of(sidecar)) as client:
        async with client.post("/v1/chat/completions", json=CHAT) as answer:
            assert answer.status == 200
            document = await answer.json()
    await lab.rested(sidecar)
    return answer.headers["X-Slotkeeper-Decision"], document["timings"]["cache_n"]


async def test_a_listed_whole_snapshot_is_restored_and_a_removed_one_is_not(build, tmp_path, command):
    async with lab.tiny_engine(Tiny.HYBRID, build, tmp_path) as engine, lab.keeping(engine) as sidecar:
        await say(sidecar)
        _, (document,) = await command("ls", opening=admin_of(sidecar))
        kept = {one["id"]: one for one in document["snapshots"]}
        assert kept
        assert all(one["engines"] == [engine.base] and one["tiers"] == ["hot"] for one in kept.values())
        assert document["tiers"][0]["bytes"] == sum(one["bytes"] for one in kept.values())

        code, lines = await command("verify", opening=admin_of(sidecar))
        assert code == 0
        assert {line["id"] for line in lines if line["verdict"] == "whole"} == set(kept)

        await lab.restarted(engine, sidecar)
        decision, cached = await say(sidecar)
        assert decision.startswith("snapshot")
        assert cached > 0

        code, lines = await command("rm", opening=admin_of(sidecar))
        assert code == 0
        assert {line["removed"] for line in lines} >= set(kept)
        assert not list(engine.flags.slot_save_path.glob("*.slot"))
        await lab.restarted(engine, sidecar)
        decision, cached = await say(sidecar)
        assert not decision.startswith("snapshot")
        assert cached == 0


async def test_a_folder_is_listed_alike_after_its_sidecar_has_ended(build, tmp_path, command):
    async with lab.tiny_engine(Tiny.DENSE, build, tmp_path) as engine:
        async with lab.keeping(engine) as sidecar:
            await say(sidecar)
            _, (before,) = await command("ls", opening=admin_of(sidecar))
        code, (after,) = await command("ls", opening=folder(engine.flags.slot_save_path, None))
    for one in before["snapshots"]:
        del one["engines"], one["name"]  # a folder has no such facts
    assert before["snapshots"]
    assert (code, after["snapshots"]) == (0, before["snapshots"])
