"""The wall clock jumps, as on a machine with an empty battery before its clock is set."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import pytest
from structlog.testing import capture_logs

from chaos.lab_snapshots import Witness, bench, in_front_of, known, turn_and_save, undisturbed
from slotkeeper.engine.child.launch import EngineKind
from slotkeeper.observe.metrics import Metrics
from slotkeeper.store.store import Store

YEAR: Final = 365.0 * 86400
JUMPS: Final = {"ten years on": 10 * YEAR, "thirty years back": -30 * YEAR}
TALKS: Final = 4  # two slots


class Clock:
    """The machine's clock, plus this many seconds."""

    def __init__(self) -> None:
        self._real = time.time
        self.ahead = 0.0

    def __call__(self) -> float:
        return self._real() + self.ahead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    monkeypatch.setitem(Store.__init__.__kwdefaults__, "clock", clock)  # the default was bound at the import
    return clock


def fallbacks(metrics: Metrics) -> float:
    (family,) = metrics.fallbacks.collect()
    return sum(sample.value for sample in family.samples)


@pytest.mark.parametrize("jump", JUMPS.values(), ids=JUMPS)
async def test_a_clock_jump_costs_no_answer_and_no_file(tmp_path: Path, clock: Clock, jump):
    """The clock jumps while the sidecar runs, and between two runs. The engine's clock stays."""
    async with bench("tiny-hybrid", EngineKind.XLLAMACPP, tmp_path / "engine", "--cache-ram", "0") as engine:
        talks = await undisturbed(engine, TALKS, turns=5)
        witness = Witness(engine.slots)
        kept: set[str] = set()
        for _ in range(2):
            with capture_logs() as log:
                async with in_front_of(engine, witness) as (sidecar, client):
                    assert kept <= known(sidecar).keys(), (
                        "no file is refused as too old or as newer than the clock"
                    )
                    asked = len(witness.asked)
                    for talk in talks:
                        await turn_and_save(sidecar, client, talk)
                    clock.ahead += jump
                    await engine.restart()
                    for talk in talks:
                        await turn_and_save(sidecar, client, talk)
                    assert len(witness.asked) > asked, "files saved before the jump are restored after it"
                    kept = set(known(sidecar))
                    assert fallbacks(sidecar.metrics) == 0
            assert not [line for line in log if line["log_level"] == "error"]
            clock.ahead += jump
        witness.agrees()
