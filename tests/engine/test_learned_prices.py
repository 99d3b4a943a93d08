"""Prices come from what the engine itself reports."""

import pytest

from engine.conftest import client_of, probed
from slotkeeper.bench import lab
from slotkeeper.bench.texts import prose
from slotkeeper.settings import Settings

pytestmark = pytest.mark.learned_prices


async def test_rates_are_those_that_the_engine_has_reported(engine):
    settings = Settings(
        upstream=(engine.base,), listen="127.0.0.1:0", admin_listen="127.0.0.1:0", slot_dir=engine.slot_dir
    )
    async with (
        probed(settings) as sidecar,
        client_of(sidecar) as client,
    ):
        (table,) = sidecar.driver.placement.tables.values()
        reported = []
        for number in range(3):
            body = {
                "prompt": f"prices {number} " + prose(1500, 70 + number),
                "n_predict": 16,
                "ignore_eos": True,
            }
            reported.append((await client.post("/completion", json=body)).json()["timings"])
        await lab.rested(sidecar)
        prefills = [timings["prompt_per_second"] for timings in reported]
        decodes = [timings["predicted_per_second"] for timings in reported]
        assert min(prefills) <= table.rates.prefill.mean <= max(prefills)
        assert table.rates.decode.mean <= max(decodes), "the answer's way to the client counts too"
        assert table.rates.prefill.measured
        assert table.rates.decode.measured
        assert table.shadow.sizes.seen
