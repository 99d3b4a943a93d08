"""`slotkeeper doctor` in front of real engines: it finds what is wrong, and its exit code says how bad."""

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
import pytest
from rich.console import Console

from engine.conftest import serves, stock, wait_until
from patience import PATIENCE
from slotkeeper.bench.models import Tiny
from slotkeeper.cli import doctor as doctor_command
from slotkeeper.cli.main import main
from slotkeeper.engine import fingerprint
from slotkeeper.engine.flags import EngineFlags
from slotkeeper.engine.launch import EngineKind, find_engine, free_port
from slotkeeper.engine.process import EngineProcess

pytestmark = pytest.mark.alternating

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
    httpx.post(f"{engine.base}/completion", json=ask, timeout=PATIENCE)
    before = httpx.get(f"{engine.base}/slots", timeout=PATIENCE).json()
    doctor(engine.base)
    after = httpx.get(f"{engine.base}/slots", timeout=PATIENCE).json()
    assert [(s["is_processing"], s.get("id_task"), s.get("n_prompt_tokens")) for s in after] == [
        (s["is_processing"], s.get("id_task"), s.get("n_prompt_tokens")) for s in before
    ]


def test_a_sleeping_engine_is_not_woken(engine_factory, build, doctor):
    engine = engine_factory(build=build, args=["--sleep-idle-seconds", "1"])

    def sleeps() -> bool:
        time.sleep(0.2)
        return httpx.get(f"{engine.base}/props", timeout=PATIENCE).json()["is_sleeping"]

    wait_until(sleeps)
    code, out = doctor(engine.base)
    assert code == 0
    assert "sleeps" in out
    assert httpx.get(f"{engine.base}/props", timeout=PATIENCE).json()["is_sleeping"]


# -- snapshots -----------------------------------------------------------------------------------------


@pytest.fixture
def look_at_files(monkeypatch):
    """Exit code and output of a look that tries out snapshots in this folder."""
    monkeypatch.setenv("COLUMNS", "300")

    def look(base: str, folder: Path) -> tuple[int, str]:
        console = Console(record=True, width=300)
        code = asyncio.run(doctor_command.doctor(base, None, console, folder))
        return code, console.export_text()

    return look


@pytest.fixture
def disk(tmp_path) -> Iterator[Callable[..., Path]]:
    """A maker of folders that are file systems of their own."""
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
def test_snapshots_that_work_are_described_and_leave_no_trace(engine_factory, build, model, look_at_files):
    engine = engine_factory(model, build)
    code, out = look_at_files(engine.base, engine.slot_dir)
    assert code == 0, out
    newer = build == EngineKind.XLLAMACPP
    assert re.search(rf"files of version {4 if newer else 2}, fingerprint [0-9a-f]{{16}}", out)
    assert ("carry the checkpoints" in out) is (newer and model is not Tiny.DENSE)
    assert ("carry no checkpoints" in out) is (not newer and model is not Tiny.DENSE)
    assert ("repair its window" in out) is (not newer and model is Tiny.SWA)
    assert "(fingerprint " in finding(out, "fingerprint", "note"), "how it is known again must be said"
    assert [path.name for path in engine.slot_dir.iterdir()] == [fingerprint.FILE]
    slots = httpx.get(f"{engine.base}/slots", timeout=PATIENCE).json()
    assert not any(slot["is_processing"] or slot.get("n_prompt_tokens") for slot in slots)


def test_an_engine_of_others_that_was_used_may_have_flags_that_nobody_knows(
    engine_factory, build, look_at_files
):
    engine = engine_factory(build=build)
    httpx.post(f"{engine.base}/completion", json={"prompt": "One, two", "n_predict": 2}, timeout=PATIENCE)
    out = look_at_files(engine.base, engine.slot_dir)[1]
    assert "another --slot-dir" in finding(out, "fingerprint", "note")
    assert not list(engine.slot_dir.iterdir())


def test_a_draft_has_its_state_in_checkpoints_only(engine_factory, build, look_at_files):
    engine = engine_factory(Tiny.HYBRID_MTP, build, args=["--spec-type", "draft-mtp"])
    out = look_at_files(engine.base, engine.slot_dir)[1]
    newer = build == EngineKind.XLLAMACPP
    assert ("only the checkpoints" in finding(out, "draft", "note")) is newer


def test_an_engine_that_saves_no_slots_fails_where_snapshots_are_wanted(bare, tmp_path, look_at_files):
    code, out = look_at_files(bare, tmp_path)
    assert code == 1
    assert "--slot-save-path" in finding(out, "snapshots", "fail")


def test_a_folder_that_the_engine_does_not_have_is_a_failure(engine, tmp_path, look_at_files):
    code, out = look_at_files(engine.base, tmp_path)
    assert code == 1
    assert "same folder" in finding(out, "snapshots", "fail")


def test_a_missing_folder_is_a_failure(engine, tmp_path, look_at_files):
    code, out = look_at_files(engine.base, tmp_path / "none")
    assert code == 1
    assert "Make the folder" in finding(out, "folder", "fail")


def test_a_read_only_folder_is_a_failure(engine, disk, look_at_files):
    code, out = look_at_files(engine.base, disk("-t", "tmpfs", "-o", "ro", "none"))
    assert code == 1
    assert "writable" in finding(out, "folder", "fail")


def test_a_full_folder_is_a_failure(engine, disk, look_at_files):
    code, out = look_at_files(engine.base, disk("-t", "tmpfs", "-o", "size=8m", "none"))
    assert code == 1
    assert "Free some space" in finding(out, "folder", "fail")


def test_a_folder_of_somebody_else_is_a_failure(engine, monkeypatch, look_at_files):
    """As root, nothing is forbidden to the tests: so the system's refusal is made up."""

    def refused(folder: Path) -> float:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(doctor_command, "written_per_second", refused)
    code, out = look_at_files(engine.base, engine.slot_dir)
    assert code == 1
    assert "chown" in finding(out, "folder", "fail")


def test_no_room_for_the_largest_state_is_a_warning(engine_factory, build, disk, look_at_files):
    """A reserve of 64 MiB and 65536 tokens of 540 bytes are more than these 96 MiB."""
    small = disk("-t", "tmpfs", "-o", "size=96m", "none")
    engine = engine_factory(Tiny.DENSE, build, args=["--slot-save-path", str(small)])
    code, out = look_at_files(engine.base, small)
    assert code == 0
    assert "No room" in finding(out, "folder", "warn")


def test_a_slow_folder_is_a_warning(engine, monkeypatch, look_at_files):
    monkeypatch.setattr(doctor_command, "written_per_second", lambda _folder: 5e6)
    code, out = look_at_files(engine.base, engine.slot_dir)
    assert code == 0
    assert "5.0 MB" in finding(out, "folder", "warn")


def test_the_speed_of_a_folder_is_measured_and_nothing_stays(tmp_path):
    assert doctor_command.written_per_second(tmp_path) > 0
    assert not list(tmp_path.iterdir())


def test_nobody_there_is_a_failure(doctor):
    code, out = doctor(f"http://127.0.0.1:{free_port()}")
    assert code == 1
    assert "does not answer" in out
