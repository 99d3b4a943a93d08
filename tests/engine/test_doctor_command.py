"""`slotkeeper doctor` in front of real engines: it finds what is wrong, and its exit code says how bad."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import httpx
import pytest

from engine.conftest import serves, stock, wait_until
from slotkeeper.bench.models import Tiny
from slotkeeper.cli import main
from slotkeeper.engine.flags import EngineFlags
from slotkeeper.engine.launch import find_engine, free_port
from slotkeeper.engine.process import EngineProcess

MEMORY = {Tiny.DENSE: "dense", Tiny.SWA: "swa, window 256", Tiny.RECURRENT: "recurrent"}


@pytest.fixture
def doctor(capsys, monkeypatch):
    """Exit code and all that was printed, in lines wide enough for a finding."""
    monkeypatch.setenv("COLUMNS", "300")

    def look(base: str, *more: str) -> tuple[int, str]:
        code = main(["doctor", "--upstream", base, *more])
        return code, capsys.readouterr().out

    return look


@pytest.fixture
def bare(build, tmp_path) -> Iterator[str]:
    """The base of an engine that cannot save its slots."""
    line = stock(Tiny.HYBRID, tmp_path, free_port())
    at = line.index("--slot-save-path")
    del line[at : at + 2]
    base = EngineFlags.parse(line).base
    process = EngineProcess(find_engine(build), line, base=base, log=tmp_path / "engine.log")
    process.start()
    try:
        wait_until(lambda: serves(process))
        yield base
    finally:
        process.kill()


def finding(out: str, trap: str, severity: str) -> str:
    """The line of one finding; a failure if there is none."""
    lines = [line for line in out.splitlines() if re.search(rf"\b{severity}\b.*\b{trap}\b", line)]
    assert lines, f"no {severity} about {trap} in:\n{out}"
    return lines[0]


def failures(out: str) -> list[str]:
    return [line for line in out.splitlines() if re.search(r"[│┃|]\s*fail\s*[│┃|]", line)]


def test_a_good_engine_is_described_and_nothing_fails(engine, doctor):
    code, out = doctor(engine.base)
    assert code == 0
    assert not failures(out)
    assert re.search(r"memory.*hybrid", out)
    assert re.search(r"slots.*2 of 65536 tokens", out)
    assert re.search(r"one KV buffer.*no", out)
    assert "started by others" in out, "what had to be guessed must be said"


@pytest.mark.parametrize("engine", MEMORY, indirect=True)
def test_every_kind_of_memory_is_named(engine, doctor):
    code, out = doctor(f"{engine.base}/")
    assert code == 0
    assert re.search(rf"memory.*{MEMORY[Tiny(engine.model.stem)]}", out)


def test_no_np_and_the_whole_context_in_each_slot_is_a_failure(engine_factory, build, doctor):
    engine = engine_factory(build=build, args=["-np", "-1", "-c", "0"])
    code, out = doctor(engine.base)
    assert code == 1
    assert "-np" in finding(out, "T6", "fail")


def test_four_slots_that_might_be_automatic_are_pointed_out(engine_factory, build, doctor):
    engine = engine_factory(build=build, args=["-np", "4"])
    code, out = doctor(engine.base)
    assert code == 0
    assert "-np" in finding(out, "T6", "note")


def test_no_slots_route_is_a_failure(engine_factory, build, doctor):
    engine = engine_factory(build=build, args=["--no-slots"])
    code, out = doctor(engine.base)
    assert code == 1
    assert "--slots" in finding(out, "slots", "fail")


def test_no_folder_for_slots_is_a_warning(bare, doctor):
    code, out = doctor(bare)
    assert code == 0
    assert "--slot-save-path" in finding(out, "snapshots", "warn")


def test_one_slot_is_a_warning(engine_factory, build, doctor):
    code, out = doctor(engine_factory(build=build, args=["-np", "1"]).base)
    assert code == 0
    assert "-np 2" in finding(out, "one-slot", "warn")


def test_an_engine_with_a_key_says_what_is_missing_and_then_opens(engine_factory, build, doctor):
    engine = engine_factory(build=build, args=["--api-key", "s3cret"])
    code, out = doctor(engine.base)
    assert code == 1
    assert "401" in out
    assert "--engine-api-key" in out

    code, out = doctor(engine.base, "--engine-api-key", "s3cret")
    assert code == 0
    assert "s3cret" not in out


def test_looking_changes_no_slot(engine, doctor):
    ask = {"prompt": "One, two, three", "n_predict": 4, "id_slot": 1}
    httpx.post(f"{engine.base}/completion", json=ask, timeout=60)
    before = httpx.get(f"{engine.base}/slots", timeout=10).json()
    doctor(engine.base)
    after = httpx.get(f"{engine.base}/slots", timeout=10).json()
    assert [(s["is_processing"], s.get("id_task"), s.get("n_prompt_tokens")) for s in after] == [
        (s["is_processing"], s.get("id_task"), s.get("n_prompt_tokens")) for s in before
    ]


def test_a_sleeping_engine_is_not_woken(engine_factory, build, doctor):
    engine = engine_factory(build=build, args=["--sleep-idle-seconds", "1"])

    def sleeps() -> bool:
        time.sleep(0.2)
        return httpx.get(f"{engine.base}/props", timeout=10).json()["is_sleeping"]

    wait_until(sleeps)
    code, out = doctor(engine.base)
    assert code == 0
    assert "sleeps" in out
    assert httpx.get(f"{engine.base}/props", timeout=10).json()["is_sleeping"]


def test_nobody_there_is_a_failure(doctor):
    code, out = doctor(f"http://127.0.0.1:{free_port()}")
    assert code == 1
    assert "does not answer" in out
