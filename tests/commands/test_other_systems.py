"""Commands on imitated Windows and macOS: modules, functions and /proc that they lack are gone here too."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import httpx
import orjson
import pytest

from commands.process import environ, serving
from patience import PATIENCE

PROGRAM: Final = Path(__file__).with_name("other_system.py")
SYSTEMS: Final = pytest.mark.parametrize("system", ["win32", "darwin"])


@SYSTEMS
def test_every_module_can_be_imported(system):
    words = (sys.executable, str(PROGRAM), system, "imports")
    done = subprocess.run(words, env=environ(), capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert "slotkeeper.app" in done.stdout.split()


@SYSTEMS
def test_a_sidecar_serves_a_request_and_stops_in_order(system, engine, tmp_path):
    command, log = (sys.executable, str(PROGRAM), system), tmp_path / "log"
    words = ("--upstream", engine.base, "--slot-dir", str(engine.slot_dir), "--drain-delay", "0")
    with log.open("wb") as err, serving(*words, command=command, stderr=err) as (process, data, _):
        asked = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4}
        answer = httpx.post(f"http://{data}/v1/chat/completions", json=asked, timeout=PATIENCE)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 4
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    events = [orjson.loads(line) for line in log.read_bytes().splitlines()]
    assert [event for event in events if event["level"] == "error"] == []
    assert "stopped" in {event["event"] for event in events}
    assert (engine.slot_dir / "slotkeeper.seal").exists()
