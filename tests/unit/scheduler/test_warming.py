"""Which conversation an empty slot is warmed with, and how many files are compared for that."""

from __future__ import annotations

from typing import Any

import pytest

from slotkeeper.scheduler.idle_work import coldest
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import EngineTraits, Memory, Snapshot, SnapshotId
from slotkeeper.scheduler.slots.shadow import EngineShadow
from slotkeeper.scheduler.slots.table import EngineTable
from slotkeeper.scheduler.snapshots.catalog import Catalog
from slotkeeper.scheduler.types import EngineId

TRAITS = EngineTraits(memory=Memory.DENSE, slot_files=True, state_version=3, fingerprint="f")
HEAD = Tokens(range(100))


@pytest.mark.parametrize("count", [20, 200])
def test_the_end_of_the_latest_conversation_is_found_without_comparing_all_files(count, monkeypatch):
    """With 8,192 files behind a few system prompts that took 60 ms, for each file that was tried."""
    catalog = Catalog()
    for n in range(count):
        for cut in (20, 50, 40):  # the cut at 40 is saved last
            tokens = HEAD + Tokens([1000 + n] * cut)
            name = SnapshotId(f"s{n}/{cut}")
            used = float(100 * n - cut)
            catalog.put(Snapshot(id=name, fingerprint="f", tokens=tokens, size=1, used=used))
    compared, lcp = [], Tokens.lcp

    def counted(*given: Any) -> int:
        compared.append(given)
        return lcp(*given)

    monkeypatch.setattr(Tokens, "lcp", counted)
    table = EngineTable(EngineId("e"), EngineShadow(TRAITS))
    found = coldest(table, catalog, 100.0 * count)
    assert found is not None
    assert found.id == f"s{count - 1}/50"
    assert len(compared) <= 3, "with the files of that conversation"
