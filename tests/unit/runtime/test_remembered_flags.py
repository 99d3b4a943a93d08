"""The next sidecar knows flags that were found out, as long as the engine is the same process."""

from __future__ import annotations

import pytest

from slotkeeper.runtime.known_engine import FLAGS_FILE, MOST_PROCESSES, keep_flags, recalled_flags, with_flags
from slotkeeper.scheduler.engine_model import EngineTraits, Known

STOCK = EngineTraits()
FOUND = STOCK.learned(Known.CANARY, checkpoint_min_step=0, ram_cache=False).learned(
    Known.KEPT, checkpoint_cap=64
)


async def test_the_same_process_has_the_same_flags_and_another_need_not(tmp_path):
    await keep_flags(tmp_path, "one", FOUND)
    known = await with_flags(tmp_path, "one", STOCK)
    assert (known, known.knowledge) == (FOUND, FOUND.knowledge)
    assert not (await with_flags(tmp_path, "another", STOCK)).knowledge


async def test_what_was_found_out_just_now_is_newer(tmp_path):
    await keep_flags(tmp_path, "one", FOUND)
    now = STOCK.learned(Known.CANARY, checkpoint_cap=0)
    known = await with_flags(tmp_path, "one", now)
    assert (known.checkpoint_cap, known.checkpoint_min_step) == (0, 0)


async def test_what_others_told_us_is_not_kept_nor_overruled(tmp_path):
    await keep_flags(tmp_path, "one", STOCK.learned(Known.FLAGS, checkpoint_cap=7))
    assert recalled_flags(tmp_path) == {}
    await keep_flags(tmp_path, "one", FOUND)
    known = await with_flags(tmp_path, "one", STOCK.learned(Known.FLAGS, checkpoint_cap=7))
    assert known.checkpoint_cap == 7


async def test_the_oldest_are_forgotten(tmp_path):
    for number in range(MOST_PROCESSES + 2):
        await keep_flags(tmp_path, str(number), FOUND)
    assert list(recalled_flags(tmp_path)) == [str(number) for number in range(2, MOST_PROCESSES + 2)]


@pytest.mark.parametrize("data", [b"", b"[", b"[]", b'{"one":3}', b'{"one":{"checkpoint_cap":[1,"guess"]}}'])
async def test_a_file_that_is_not_ours_is_nothing_known(tmp_path, data):
    (tmp_path / FLAGS_FILE).write_bytes(data)
    assert await with_flags(tmp_path, "one", STOCK) == STOCK


async def test_a_flag_of_another_version_is_passed_over(tmp_path):
    (tmp_path / FLAGS_FILE).write_bytes(
        b'{"one":{"no_such_flag":[1,"canary"],"checkpoint_cap":[64,"canary"]}}'
    )
    known = await with_flags(tmp_path, "one", STOCK)
    assert (known.checkpoint_cap, dict(known.knowledge)) == (64, {"checkpoint_cap": Known.CANARY})


async def test_a_folder_that_is_gone_costs_nothing_but_the_memory(tmp_path):
    await keep_flags(tmp_path / "none", "one", FOUND)
    assert await with_flags(tmp_path / "none", "one", STOCK) == STOCK
