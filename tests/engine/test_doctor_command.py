"""`slotkeeper doctor` in front of real engines: it finds faults, and its exit code shows their severity."""

from __future__ import annotations

import asyncio
import errno
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import orjson
import pytest
from benchmarks.engine_profiles import read_profile
from rich.console import Console

from engine.conftest import serves, stock, wait_until
from patience import PATIENCE
from slotkeeper.bench.models import Tiny
from slotkeeper.cli import doctor as doctor_command
from slotkeeper.cli.main import main
from slotkeeper.engine.child.launch import EngineKind, find_engine, free_port
from slotkeeper.engine.child.process import EngineProcess
from slotkeeper.engine.flags import EngineFlags
from slotkeeper.scheduler.slots.engine_model import Memory


@pytest.fixture
def doctor(capsys, monkeypatch):
    """Return the exit code and the output, in lines wide enough for a finding."""
    monkeypatch.setenv("COLUMNS", "300")

    def look(base: str, *more: str) -> tuple[int, str]:
        code = main(["doctor", "--upstream", base, *more])
        return code, capsys.readouterr().out

    return look


@pytest.fixture
def bare(build, tmp_path) -> Iterator[str]:
    """Return the URL of an engine that cannot save its slots."""
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
    """Return the line of one finding; fail if there is none."""
    lines = [line for line in out.splitlines() if re.search(rf"\b{severity}\b.*\b{trap}\b", line)]
    assert lines, f"no {severity} about {trap} in:\n{out}"
    return lines[0]


def failures(out: str) -> list[str]:
    return [line for line in out.splitlines() if re.search(r"[│┃|]\s*fail\s*[│┃|]", line)]


def test_doctor_describes_a_good_engine_without_failures(engine, doctor):
    code, out = doctor(engine.base)
    assert code == 0
    assert not failures(out)
    assert re.search(r"memory.*hybrid", out)
    assert re.search(r"slots.*2 of 65536 tokens", out)
    assert re.search(r"one KV buffer.*no", out)
    assert "started by others" in out, "doctor must report what it guessed"


def test_doctor_fails_if_np_is_missing_and_each_slot_has_the_whole_context(engine_factory, build, doctor):
    engine = engine_factory(build=build, args=["-np", "-1", "-c", "0"])
    code, out = doctor(engine.base)
    assert code == 1
    assert "-np" in finding(out, "T6", "fail")


def test_doctor_reads_the_flags_of_an_engine_on_this_machine(engine_factory, build, doctor):
    """Four slots that were asked for are no problem, and an address that every client can reach is one."""
    flags = ["-np", "4", "--host", "0.0.0.0"]  # noqa: S104 - what doctor warns of
    code, out = doctor(engine_factory(build=build, args=flags).base)
    assert code == 0
    assert "T6" not in out
    assert "127.0.0.1" in finding(out, "T1", "warn")


def test_doctor_warns_of_a_missing_slot_folder(bare, doctor):
    code, out = doctor(bare)
    assert code == 0
    assert "--slot-save-path" in finding(out, "snapshots", "warn")


def test_doctor_asks_for_a_missing_api_key_and_succeeds_with_it(engine_factory, build, doctor):
    engine = engine_factory(build=build, args=["--api-key", "s3cret"])
    code, out = doctor(engine.base)
    assert code == 1
    assert "401" in out
    assert "--engine-api-key" in out

    code, out = doctor(engine.base, "--engine-api-key", "s3cret")
    assert code == 0
    assert "s3cret" not in out


def test_doctor_changes_no_slot(engine, doctor):
    ask = {"prompt": "One, two, three", "n_predict": 4, "id_slot": 1}
    httpx.post(f"{engine.base}/completion", json=ask, timeout=PATIENCE)
    before = httpx.get(f"{engine.base}/slots", timeout=PATIENCE).json()
    doctor(engine.base)
    after = httpx.get(f"{engine.base}/slots", timeout=PATIENCE).json()
    assert [(s["is_processing"], s.get("id_task"), s.get("n_prompt_tokens")) for s in after] == [
        (s["is_processing"], s.get("id_task"), s.get("n_prompt_tokens")) for s in before
    ]


def test_doctor_does_not_wake_a_sleeping_engine(engine_factory, build, doctor):
    engine = engine_factory(build=build, args=["--sleep-idle-seconds", "1"])

    def sleeps() -> bool:
        time.sleep(0.2)
        return httpx.get(f"{engine.base}/props", timeout=PATIENCE).json()["is_sleeping"]

    wait_until(sleeps)
    code, out = doctor(engine.base)
    assert code == 0
    assert "sleeps" in out
    assert httpx.get(f"{engine.base}/props", timeout=PATIENCE).json()["is_sleeping"]


# -- speed ---------------------------------------------------------------------------------------------


def test_doctor_measures_an_engine_as_a_profile_for_the_simulator(engine_factory, build, doctor, tmp_path):
    engine = engine_factory(build=build)
    code, out = doctor(engine.base, "--measure", "--json", "--slot-dir", str(engine.slot_dir))
    assert code == 0
    file = tmp_path / "mine.json"
    file.write_text(out, "utf-8")
    profile = read_profile(file)
    assert (profile.name, profile.memory) == ("tiny-hybrid", Memory.HYBRID)
    measured = orjson.loads(out)["rates"]
    assert measured.keys() == {
        "prefill", "decode", "deeper", "save", "restore", "file_seconds", "token_bytes", "checkpoint_bytes",
    }  # fmt: skip
    assert min(measured[name] for name in ("prefill", "decode", "save", "restore", "token_bytes")) > 0
    assert not held(engine), "the slot is erased"
    assert not list(engine.slot_dir.iterdir())


def test_doctor_measures_without_files_and_shows_a_table(engine, doctor):
    code, out = doctor(engine.base, "--measure")
    assert code == 0
    assert re.search(r"prefill of 512 tokens at the beginning.*tokens/s", out)
    assert re.search(r"save and restore.*--slot-dir", out)


def test_doctor_overwrites_no_conversation_to_measure(engine_factory, build, doctor):
    engine = engine_factory(build=build)
    for slot in (0, 1):
        ask = {"prompt": f"Slot {slot}: one, two", "n_predict": 2, "id_slot": slot}
        httpx.post(f"{engine.base}/completion", json=ask, timeout=PATIENCE)
    before = held(engine)
    code, out = doctor(engine.base, "--measure")
    assert code == 1
    assert "Each slot holds a conversation" in out
    assert held(engine) == before


def test_doctor_disturbs_no_running_request_to_measure(engine_factory, build, doctor):
    engine = engine_factory(build=build)
    ask = {"prompt": "One, two", "n_predict": -1, "ignore_eos": True, "id_slot": 0, "stream": True}
    with httpx.stream("POST", f"{engine.base}/completion", json=ask, timeout=PATIENCE) as answer:
        chunks = answer.iter_bytes()
        next(chunks)
        code, out = doctor(engine.base, "--measure")
    assert code == 1
    assert "A request runs" in out


def held(engine) -> list[int]:
    """Return the tokens in each slot, without those that are empty."""
    slots = httpx.get(f"{engine.base}/slots", timeout=PATIENCE).json()
    return [slot["n_prompt_tokens"] for slot in slots if slot.get("n_prompt_tokens")]


# -- snapshots -----------------------------------------------------------------------------------------


@pytest.fixture
def look_at_files(monkeypatch):
    """Run doctor with a probe of snapshots in this folder; return exit code and output."""
    monkeypatch.setenv("COLUMNS", "300")

    def look(base: str, folder: Path) -> tuple[int, str]:
        console = Console(record=True, width=300)
        code = asyncio.run(doctor_command.doctor(base, None, console, folder))
        return code, console.export_text()

    return look


@pytest.fixture
def disk(tmp_path) -> Iterator[Callable[..., Path]]:
    """Return a function that makes folders with their own file systems."""
    folders: list[Path] = []

    def mount(*args: str) -> Path:
        program, folder = shutil.which("mount"), tmp_path / f"disk{len(folders)}"
        folder.mkdir()
        if not program or subprocess.run([program, *args, folder], check=False).returncode:
            pytest.skip("only root can mount a disk")
        folders.append(folder)
        return folder

    yield mount
    for folder in reversed(folders):
        subprocess.run([shutil.which("umount"), folder], check=True)


@pytest.mark.parametrize("model", [Tiny.DENSE, Tiny.SWA, Tiny.HYBRID])
def test_doctor_describes_working_snapshots_and_leaves_no_file(engine_factory, build, model, look_at_files):
    engine = engine_factory(model, build)
    code, out = look_at_files(engine.base, engine.slot_dir)
    assert code == 0, out
    newer = build == EngineKind.XLLAMACPP
    assert re.search(rf"files of version {4 if newer else 2}, fingerprint [0-9a-f]{{16}}", out)
    assert ("carry the checkpoints" in out) is (newer and model is not Tiny.DENSE)
    assert ("carry no checkpoints" in out) is (not newer and model is not Tiny.DENSE)
    assert ("repair its window" in out) is (not newer and model is Tiny.SWA)
    assert "Slotkeeper did not start it" in finding(out, "fingerprint", "note"), (
        "doctor must report how the engine is recognised"
    )
    assert list(engine.slot_dir.iterdir()) == [], "its flags were read, so its logprobs are not needed"
    slots = httpx.get(f"{engine.base}/slots", timeout=PATIENCE).json()
    assert not any(slot["is_processing"] or slot.get("n_prompt_tokens") for slot in slots)


def test_doctor_fails_for_snapshots_if_the_engine_cannot_save_slots(bare, tmp_path, look_at_files):
    code, out = look_at_files(bare, tmp_path)
    assert code == 1
    assert "--slot-save-path" in finding(out, "snapshots", "fail")


def test_doctor_fails_for_a_folder_that_is_missing_or_not_the_engines(engine, tmp_path, look_at_files):
    code, out = look_at_files(engine.base, tmp_path)
    assert (code, "same folder" in finding(out, "snapshots", "fail")) == (1, True)
    code, out = look_at_files(engine.base, tmp_path / "none")
    assert (code, "Make the folder" in finding(out, "folder", "fail")) == (1, True)


@pytest.mark.parametrize(
    ("option", "advice"), [("ro", "writable"), ("size=8m", "Free some space")], ids=["read-only", "full"]
)
def test_doctor_fails_for_a_folder_that_cannot_be_written(engine, disk, look_at_files, option, advice):
    code, out = look_at_files(engine.base, disk("-t", "tmpfs", "-o", option, "none"))
    assert code == 1
    assert advice in finding(out, "folder", "fail")


def test_doctor_fails_for_a_folder_of_another_user(engine, monkeypatch, look_at_files):
    """Tests may run as root, to whom the system refuses nothing, so the refusal is faked."""

    def refused(folder: Path) -> float:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(doctor_command, "written_per_second", refused)
    code, out = look_at_files(engine.base, engine.slot_dir)
    assert code == 1
    assert "chown" in finding(out, "folder", "fail")


def test_doctor_warns_if_the_largest_state_does_not_fit(engine_factory, build, disk, look_at_files):
    """A reserve of 64 MiB and 65536 tokens of 540 bytes are more than these 96 MiB."""
    small = disk("-t", "tmpfs", "-o", "size=96m", "none")
    engine = engine_factory(Tiny.DENSE, build, args=["--slot-save-path", str(small)])
    code, out = look_at_files(engine.base, small)
    assert code == 0
    assert "No room" in finding(out, "folder", "warn")


def test_doctor_warns_of_a_slow_folder(engine, monkeypatch, look_at_files):
    monkeypatch.setattr(doctor_command, "written_per_second", lambda _folder: 5e6)
    code, out = look_at_files(engine.base, engine.slot_dir)
    assert code == 0
    assert "5.0 MB" in finding(out, "folder", "warn")


def test_doctor_measures_the_write_speed_and_leaves_no_file(tmp_path):
    assert doctor_command.written_per_second(tmp_path) > 0
    assert not list(tmp_path.iterdir())


def test_doctor_fails_for_an_engine_that_does_not_answer(doctor):
    code, out = doctor(f"http://127.0.0.1:{free_port()}")
    assert code == 1
    assert "does not answer" in out
