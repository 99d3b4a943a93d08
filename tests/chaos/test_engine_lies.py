"""An engine that reports reuse that is impossible."""

from __future__ import annotations

import aiohttp
import orjson

from chaos.fake_answers import PATHS, answer_body, request_body
from chaos.fake_engine import Fault
from chaos.fake_http import whole
from chaos.raw import until
from slotkeeper.api.head import Api


async def test_impossible_reuse_is_counted_and_the_slots_contents_are_forgotten(fake, sidecar, data):
    body = request_body(Api.CHAT, stream=False, text="Ninety-nine bottles of beer. " * 40)
    tokens = fake.control.prompt_tokens(orjson.dumps(body))
    lie = orjson.loads(answer_body(Api.CHAT, tokens, 0))
    lie["timings"] |= {"cache_n": tokens - 10, "prompt_n": 10}
    fake.custom = whole(200, lie)
    fake.script.append(Fault.CUSTOM)
    async with (
        aiohttp.ClientSession(f"http://{data}") as client,
        client.post(PATHS[Api.CHAT], json=body) as answer,
    ):
        assert answer.status == 200, "the client already has the answer"
    value = sidecar.metrics.registry.get_sample_value
    await until(
        lambda: value("slotkeeper_poisoned_slots_total", {"reason": "unheard"}) == 1, "it is counted once"
    )
    (table,) = sidecar.driver.placement.tables.values()
    assert not any(held and held.tokens for held in table.shadow.slots)
