"""The next sidecar knows flags that were found out, as long as the engine is the same process."""

from __future__ import annotations

import pytest

from slotkeeper.runtime.link import FLAGS_FILE, MOST_PROCESSES, keep_flags, recalled_flags, with_flags
from slotkeeper.scheduler.slots.engine_model import EngineTraits, Known

STOCK = EngineTraits()
FOUND = STOCK.learned(Known.CANARY, checkpoint_min_step=0, ram_cache=False).learned(
    Known.KEPT, checkpoint_cap=64
)


async def test_learned_flags_are_applied_to_the_same_process_only(tmp_path):
    await keep_flags(tmp_path, "one", FOUND)
    known = await with_flags(tmp_path, "one", STOCK)
    assert (known, known.knowledge) == (FOUND, FOUND.knowledge)
    assert not (await with_flags(tmp_path, "another", STOCK)).knowledge


async def test_newly_learned_flags_precede_remembered_ones(tmp_path):
    await keep_flags(tmp_path, "one", FOUND)
    now = STOCK.learned(Known.CANARY, checkpoint_cap=0)
    known = await with_flags(tmp_path, "one", now)
    assert (known.checkpoint_cap, known.checkpoint_min_step) == (0, 0)


async def test_flags_from_the_command_line_are_neither_stored_nor_replaced(tmp_path):
    await keep_flags(tmp_path, "one", STOCK.learned(Known.FLAGS, checkpoint_cap=7))
    assert recalled_flags(tmp_path) == {}
    await keep_flags(tmp_path, "one", FOUND)
    known = await with_flags(tmp_path, "one", STOCK.learned(Known.FLAGS, checkpoint_cap=7))
    assert known.checkpoint_cap == 7


async def test_the_flags_of_the_oldest_processes_are_forgotten(tmp_path):
    for number in range(MOST_PROCESSES + 2):
        await keep_flags(tmp_path, str(number), FOUND)
    assert list(recalled_flags(tmp_path)) == [str(number) for number in range(2, MOST_PROCESSES + 2)]


@pytest.mark.parametrize("data", [b"", b"[", b"[]", b'{"one":3}', b'{"one":{"checkpoint_cap":[1,"guess"]}}'])
async def test_an_unreadable_file_gives_no_flags(tmp_path, data):
    (tmp_path / FLAGS_FILE).write_bytes(data)
    assert await with_flags(tmp_path, "one", STOCK) == STOCK


async def test_an_unknown_flag_is_ignored(tmp_path):
    (tmp_path / FLAGS_FILE).write_bytes(
        b'{"one":{"no_such_flag":[1,"canary"],"checkpoint_cap":[64,"canary"]}}'
    )
    known = await with_flags(tmp_path, "one", STOCK)
    assert (known.checkpoint_cap, dict(known.knowledge)) == (64, {"checkpoint_cap": Known.CANARY})


async def test_a_missing_folder_is_ignored(tmp_path):
    await keep_flags(tmp_path / "none", "one", FOUND)
    assert await with_flags(tmp_path / "none", "one", STOCK) == STOCK
