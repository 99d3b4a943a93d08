"""What a run consumes: sums over legs, and the energy that a machine tells."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from slotkeeper.bench import consumption
from slotkeeper.bench.consumption import (
    Energy,
    Meter,
    Used,
    family,
    peak_memory_bytes,
    processor_seconds,
    watts_in,
)


def test_memory_is_the_largest_and_all_else_a_sum_if_every_leg_knows_it():
    one = Used(engine_bytes=5, sidecar_bytes=None, sidecar_seconds=1.0, written_bytes=3, watt_seconds=2.0)
    other = Used(engine_bytes=7, sidecar_bytes=4, sidecar_seconds=2.0, written_bytes=4, watt_seconds=None)
    assert Used.together([one, other]) == Used(engine_bytes=7, sidecar_seconds=3.0, written_bytes=7)
    assert Used.together([]) == Used()


@pytest.mark.parametrize(
    ("said", "watts"),
    [
        (b"75.5\n", 75.5),
        (b"75.5\n24.5\n", 100.0),
        (b"[N/A]\n", None),
        (b"", None),
        (b'{"card0": {"Average Graphics Package Power (W)": "38.0"}, "card1": {"x": "1"}}', 38.0),
        (b'{"card0": {"Temperature": "38.0"}}', None),
        (b"No devices were found", None),
    ],
)
def test_the_power_of_cards_is_read_as_their_programs_print_it(said, watts):
    assert watts_in(said) == watts


async def test_energy_is_that_of_processors_and_cards_together(tmp_path, monkeypatch):
    for name, at in (("intel-rapl:0", 1_000_000), ("intel-rapl:1", 9_000_000), ("intel-rapl:0:0", 5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{at}\n")
        (tmp_path / name / "max_energy_range_uj").write_text("10000000\n")
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!{sys.executable}\nprint(10.0)\n")
    program.chmod(0o755)
    monkeypatch.setattr(consumption, "RAPL", tmp_path)
    monkeypatch.setattr(consumption, "LOOK_SECONDS", 0.01)
    monkeypatch.setenv("PATH", str(tmp_path))
    energy = Energy()
    await energy.start()
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("4000000\n")  # 3 Ws more
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("1000000\n")  # 2 Ws more: the counter has wrapped
    while energy._cards is None:
        await asyncio.sleep(0.01)
    cards = energy._cards
    found = await energy.stop()
    assert found is not None
    assert found >= 5.0 + cards > 5.0


async def test_without_counters_and_cards_energy_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(consumption, "RAPL", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    energy = Energy()
    await energy.start()
    assert await energy.stop() is None


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="only Linux tells it")
async def test_a_process_is_measured_while_the_block_runs():
    """It is one of its own: that of the tests may have started others, which a sidecar counts with."""
    work = "input(); sum(range(1_000_000)); print(flush=True); input()"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", work, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    async with Meter(engine=process.pid, sidecar=process.pid) as meter:
        process.stdin.write(b"\n")
        assert await process.stdout.readline()
    await process.communicate(b"\n")
    assert meter.used.engine_bytes == meter.used.sidecar_bytes
    assert (meter.used.engine_bytes or 0) > 2**20
    assert (meter.used.sidecar_seconds or 0) > 0
    assert await process.wait() == 0


async def test_a_process_that_runs_elsewhere_is_unknown():
    async with Meter(engine=None, sidecar=None) as meter:
        pass
    assert meter.used.engine_bytes is None
    assert meter.used.written_bytes is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells it")
def test_the_time_of_threads_that_ended_counts():
    """A server may start a thread for each request."""
    took: list[float] = []

    def work() -> None:
        sum(range(1_000_000))
        took.append(time.thread_time())

    before = processor_seconds(os.getpid())
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    after = processor_seconds(os.getpid())
    assert before is not None
    assert after is not None
    assert after - before >= took[0] > 0
    assert processor_seconds(None) is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells it")
async def test_the_processes_that_a_sidecar_started_count():
    """nginx works in another process than the one that was started."""
    child = "print(flush=True); input()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", parent, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline()
    async with Meter(engine=None, sidecar=process.pid) as meter:
        pids = family(process.pid)
    alone = peak_memory_bytes(process.pid)
    await process.communicate(b"\n")
    assert len(pids) == 2
    assert alone is not None
    assert (meter.used.sidecar_bytes or 0) > alone
    assert await process.wait() == 0
