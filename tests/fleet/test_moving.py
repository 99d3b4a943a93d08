"""Conversations that move to another sidecar and engine are found there, and continue from their state."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from chaos.lab_snapshots import (
    CHAT,
    Talk,
    Witness,
    bench,
    in_front_of,
    known,
    settled,
    take_turn,
    undisturbed,
)
from fleet.servers import BUCKET, versitygw
from slotkeeper.app import Sidecar
from slotkeeper.engine.child.launch import EngineKind, free_port
from slotkeeper.scheduler.types import Tier

MODEL: Final = "tiny-hybrid"
BUILD: Final = EngineKind.XLLAMACPP.value
# characters: with these, computing a state takes longer than fetching it, on small models too
LEAD: Final = 7_000
ROUNDED: Final = 64  # tokens beyond the new part: a state can be cut at checkpoints only


async def uploaded(sidecar: Sidecar) -> None:
    """Wait until everything is saved and uploaded."""
    await settled(sidecar)
    assert sidecar.driver.snapshots
    await sidecar.driver.snapshots.written()
    assert all(Tier.COLD in kept.tiers for kept in known(sidecar).values())


async def _turn(client: aiohttp.ClientSession, talk: Talk) -> int:
    """Send a turn; return the tokens that are known after it."""
    async with client.post(CHAT, json=talk.body(talk.turn)) as answer:
        usage = (await answer.json())["usage"]
    talk.turn += 1
    return int(usage["prompt_tokens"] + usage["completion_tokens"])


@pytest.mark.usefixtures("patient_looks")
@pytest.mark.parametrize("where", ["s3", "folder", pytest.param("versitygw", marks=pytest.mark.fleet)])
async def test_a_conversation_that_moves_computes_only_its_new_tokens(
    where: str, s3: str, redis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It moves away and back; the objects are sealed with a key."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    key = tmp_path / "key"
    key.write_text("k" * 64)
    more: dict[str, Any] = {"cold_store": f"s3://{BUCKET}/{tmp_path.name}", "hints": redis}
    if where == "folder":
        more = {"cold_store": str(tmp_path / "shared")}
    async with AsyncExitStack() as stack:
        if where == "versitygw":
            port = free_port()
            stack.enter_context(versitygw(tmp_path / "data", port))
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        one = await stack.enter_async_context(bench(MODEL, BUILD, tmp_path / "one"))
        other = await stack.enter_async_context(bench(MODEL, BUILD, tmp_path / "other"))
        (talk,) = await undisturbed(one, 1, turns=4)
        witnesses = [Witness(engine.slots) for engine in (one, other)]
        first = await stack.enter_async_context(in_front_of(one, witnesses[0], store_key_file=key, **more))
        second = await stack.enter_async_context(in_front_of(other, witnesses[1], store_key_file=key, **more))
        await take_turn(first[1], talk)
        held = await _turn(first[1], talk)
        await uploaded(first[0])
        async with second[1].post(CHAT, json=talk.body(talk.turn)) as answer:
            answered = await answer.json()
        assert answered["choices"][0]["message"] == talk.replies[talk.turn]
        talk.turn += 1
        new = answered["usage"]["prompt_tokens"] - held
        assert answered["timings"]["prompt_n"] <= new + ROUNDED
        await uploaded(second[0])
        await take_turn(first[1], talk)  # back at the first sidecar, whose own state may be nearly as good
        assert all(witness.refused == 0 for witness in witnesses)
        assert witnesses[1].asked


KEYS: Final = """
[alice]
key = "a-long-key-of-alice"
[bob]
key = "a-long-key-of-bob--"
"""


@pytest.mark.usefixtures("patient_looks")
async def test_a_state_in_the_store_is_restored_only_for_the_key_that_saved_it(
    s3: str, redis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The same prompt at another sidecar: its own key finds the state, another key computes it in full."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    more: dict[str, Any] = {
        "cold_store": f"s3://{BUCKET}/{tmp_path.name}",
        "hints": redis,
        "namespaces": "key",
        "keys_file": keys,
    }
    alice, bob = ({"Authorization": f"Bearer a-long-key-of-{name}"} for name in ("alice", "bob--"))
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(bench(MODEL, BUILD, tmp_path / "one"))
        other = await stack.enter_async_context(bench(MODEL, BUILD, tmp_path / "other"))
        (talk,) = await undisturbed(one, 1, turns=2, lead=LEAD)
        first, client = await stack.enter_async_context(in_front_of(one, **more))
        _, elsewhere = await stack.enter_async_context(in_front_of(other, **more))
        await _computed(client, talk, 0, alice)
        await uploaded(first)
        prompt, computed = await _computed(elsewhere, talk, 1, bob)
        assert computed == prompt
        prompt, computed = await _computed(elsewhere, talk, 1, alice)
        assert computed <= prompt / 2


async def _computed(
    client: aiohttp.ClientSession, talk: Talk, turn: int, key: dict[str, str]
) -> tuple[int, int]:
    """Return the prompt tokens of one turn, and how many of them its client waited for."""
    async with client.post(CHAT, json=talk.body(turn), headers=key) as answer:
        assert answer.status == 200, await answer.text()
        said = await answer.json()
        planted = int(answer.headers.get("X-Slotkeeper-Planted", "0"))
    assert said["choices"][0]["message"] == talk.replies[turn]
    return said["usage"]["prompt_tokens"], said["timings"]["prompt_n"] + planted
