"""The control calls, on both builds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import psutil
import pytest
from yarl import URL

from chaos.raw import until_async
from slotkeeper.engine.answers import EngineError, EngineGoneError, Health
from slotkeeper.engine.child.launch import free_port
from slotkeeper.engine.client import KEPT, EngineClient
from slotkeeper.scheduler.types import SlotId

CHAT = {"messages": [{"role": "user", "content": "Name the seven seas."}]}


@pytest.fixture
async def client(engine) -> AsyncIterator[EngineClient]:
    async with EngineClient(engine.base) as client:
        yield client


async def ids_for(client: EngineClient, word: str, length: int) -> list[int]:
    """Return a prompt of this many tokens, which shares no prefix with one for another word."""
    ids = await client.tokenize(
        f"{word} the quick brown fox " * length, add_special=False, parse_special=True
    )
    return ids[:length]


async def test_a_serving_engine_is_healthy_and_a_closed_port_is_down(client):
    assert await client.health() is Health.OK
    async with EngineClient(f"http://127.0.0.1:{free_port()}") as nobody:
        assert await nobody.health() is Health.DOWN
        with pytest.raises(EngineGoneError):
            await nobody.props()


async def test_props_report_slots_context_and_model(client, engine):
    props = await client.props()
    assert props["total_slots"] == 2
    assert props["default_generation_settings"]["n_ctx"] == 65536
    assert props["model_path"] == str(engine.model)


async def test_the_template_and_the_tokenizer_give_the_token_count_of_the_chat_route(client, engine):
    text = await client.apply_template(CHAT)
    ids = await client.tokenize(text, add_special=True, parse_special=True)
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{engine.base}/v1/chat/completions", json=CHAT | {"max_tokens": 1}) as answer,
    ):
        usage = (await answer.json())["usage"]
    assert usage["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("text", ["", "Bolts, M4 & M5.\n\tüßø → 漢字 🔩", " leading", "<|im_end|>"])
async def test_detokenizing_tokens_gives_the_original_text(client, text):
    for special in (True, False):
        ids = await client.tokenize(text, add_special=False, parse_special=special)
        assert await client.detokenize(ids) == text


async def test_tokens_that_split_a_character_can_be_detokenized(client):
    ids = await client.tokenize("🔩🔩", add_special=False, parse_special=False)
    assert isinstance(await client.detokenize(ids[:1]), str)
    assert isinstance(await client.detokenize(ids[1:]), str)


async def test_unknown_token_ids_are_refused_and_the_engine_stays_up(client):
    with pytest.raises(EngineError):
        await client.detokenize([1 << 30])
    assert await client.health() is Health.OK


async def test_a_prefill_leaves_exactly_its_tokens_in_the_slot(client):
    ids = await ids_for(client, "exact", 300)
    first = await client.prefill(ids, SlotId(1))
    again = await client.prefill([*ids, *ids[:40]], SlotId(1))
    assert (first.slot, first.computed + first.cached, first.held) == (1, 300, 300)
    assert (again.cached, again.computed, again.held) == (300, 40, 340)
    assert (await client.slots())[1].held == 340


async def test_a_prefill_reports_the_seconds_that_the_engine_computed(client):
    ids = await ids_for(client, "timed", 2000)
    all_of_it = (await client.prefill(ids, SlotId(1))).seconds
    nearly_nothing = [(await client.prefill(ids, SlotId(1))).seconds for _ in range(5)]
    assert all_of_it > min(nearly_nothing) > 0  # a busy machine may hold one of them up


async def test_many_calls_at_once_keep_few_connections_to_the_engine_open(client, engine):
    """An idle connection keeps one of the engine's np + 4 threads."""

    async def calls(number: int) -> None:
        await client.tokenize(f"number {number}", add_special=True, parse_special=True)
        await client.health()
        with pytest.raises(EngineError):
            await client.restore(SlotId(0), "there-is-none")

    def open_connections() -> int:
        ports = [one.raddr.port for one in psutil.Process().net_connections("tcp") if one.raddr]
        return ports.count(URL(engine.base).port)

    await asyncio.gather(*map(calls, range(64)))
    for _ in range(3 * KEPT):
        await client.slots()
        assert open_connections() <= KEPT


async def test_a_saved_state_can_be_restored_in_another_slot(client, engine):
    ids = await ids_for(client, "saved", 300)
    await client.prefill(ids, SlotId(0))
    saved = await client.save(SlotId(0), "state")
    assert (saved.tokens, saved.written) == (300, (engine.slot_dir / "state").stat().st_size)
    assert saved.seconds > 0

    restored = await client.restore(SlotId(1), "state")
    assert (restored.tokens, restored.read) == (300, saved.written)
    assert restored.seconds > 0
    assert (await client.prefill([*ids, 5, 6], SlotId(1))).cached == 300
    assert await client.erase(SlotId(1)) == 302
    assert await client.erase(SlotId(1)) == 0


async def test_a_file_that_cannot_be_restored_gives_an_error_and_empties_the_slot(client, engine):
    (engine.slot_dir / "short").write_bytes(b"qsgg")
    await client.prefill([5, 6, 7], SlotId(1))
    for name in ("short", "missing", "no/folder"):
        with pytest.raises(EngineError) as refused:
            await client.restore(SlotId(1), name)
        assert refused.value.status == 400
    assert await client.erase(SlotId(1)) == 0


async def test_a_slot_is_busy_while_it_generates(client, engine):
    body = {"prompt": "Count.", "n_predict": 60000, "id_slot": 0, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{engine.base}/completion", json=body) as answer:
            await answer.content.readany()
            seen = await client.slots()
            assert [slot.busy for slot in seen] == [True, False]
            assert seen[0].task is not None

        async def released() -> bool:
            return not (await client.slots())[0].busy

        await until_async(released)


async def test_a_cancelled_prefill_frees_the_slot_before_its_last_token(client):
    ids = await ids_for(client, "cancelled", 60000)

    async def busy() -> bool:
        return (await client.slots())[0].busy

    async def idle() -> bool:
        return not await busy()

    async with asyncio.TaskGroup() as group:
        prefill = group.create_task(client.prefill(ids, SlotId(0)))
        await until_async(busy)
        prefill.cancel()
    await until_async(idle)
    held = (await client.slots())[0].held
    assert held is not None
    assert held < len(ids)


async def test_a_refused_call_raises_an_error_with_the_engines_message(client):
    with pytest.raises(EngineError, match="invalid tokens") as refused:
        await client.prefill([1, 2, 1 << 30], SlotId(0))
    assert refused.value.status == 400


async def test_an_api_key_gives_access_to_the_routes_that_need_it(engine_factory, build):
    locked = engine_factory(build=build, args=["--api-key", "secret"])
    async with EngineClient(locked.base) as stranger, EngineClient(locked.base, api_key="secret") as friend:
        assert await stranger.health() is Health.OK
        with pytest.raises(EngineError) as refused:
            await stranger.props()
        assert refused.value.status == 401
        assert (await friend.props())["total_slots"] == 2
        assert (await stranger.props(headers={"X-Api-Key": "secret"}))["total_slots"] == 2
        assert "secret" not in repr(friend)
