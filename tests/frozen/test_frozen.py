"""No decision of the scheduler has changed since the digests were written, or the change was meant."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from math import nextafter
from pathlib import Path
from typing import Any, Final

import orjson
import pytest
from benchmarks import profiles

from frozen.__main__ import DIGESTS, changes, main, read, row, written
from frozen.names import BEFORE, called
from frozen.recorder import Recording
from frozen.runs import OFTEN, RUNS
from slotkeeper.scheduler.effects import Drop, Stop
from slotkeeper.scheduler.events import Arrived, TimerFired
from slotkeeper.scheduler.placement import Placement
from slotkeeper.scheduler.slots.engine_model import SnapshotId
from slotkeeper.scheduler.types import ClientId, RequestId

ROOT: Final = Path(__file__).parents[2]
RUN: Final = "session/cpu-8b/append"  # a short one
TICK: Final = TimerFired(at=1.0)


@pytest.mark.parametrize("kind", ["playbook", "machine", "fleet", "session"])
def test_decisions_are_those_of_the_digests(kind):
    """In a process of its own: what other tests have imported or measure must not matter."""
    path = os.pathsep.join(map(str, (ROOT / "tests", ROOT)))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "random"}
    command = (sys.executable, "-m", "frozen", "--check", "--often", "--only", f"{kind}/")
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_each_run_has_a_digest_and_the_file_is_as_it_is_written():
    kept = read(DIGESTS)
    assert {*RUNS} == {name for name in kept if not name.startswith("playbook/")}
    assert {*OFTEN} < {*RUNS}
    assert DIGESTS.read_text("utf-8") == written(kept)


# -- a digest changes with a decision --------------------------------------------------------------------


def test_another_decision_is_found_shown_and_written(tmp_path, monkeypatch, capsys):
    path, folder = tmp_path / "digests.json", str(tmp_path / "before")
    command = ("--only", RUN)
    assert main([*command], path) == main([*command, "--check"], path) == 0
    assert main([*command, "--write", folder], path) == main([*command, "--compare", folder], path) == 0
    before = path.read_text("utf-8")
    capsys.readouterr()

    later = replace(profiles.LIMITS, pause=profiles.LIMITS.pause + 1)  # slots are saved a second later
    monkeypatch.setattr(profiles, "LIMITS", later)
    assert main([*command, "--check"], path) == 1
    assert path.read_text("utf-8") == before
    said = capsys.readouterr().out
    assert f"{RUN}: " in said
    assert "make frozen" in said
    assert main([*command, "--compare", folder], path) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith(f"{RUN}, seed 1, event ")
    assert [line for line in shown if line.startswith("-") and "SetTimer" in line]
    assert main([*command], path) == main([*command, "--check"], path) == 0
    assert path.read_text("utf-8") != before


def test_a_change_is_told_in_words():
    old = {"digest": "a", "events": 3, "effects": {"Forward": 1, "Save": 2}}
    new = {"digest": "b", "events": 4, "effects": {"Forward": 1, "Stop": 1}}
    assert changes(old, new) == "events 3 -> 4, Save 2 -> 0, Stop 0 -> 1"
    assert changes(old, {**old, "digest": "b"}) == "as many effects of each kind, but others"
    assert (changes(None, new), changes(old, None)) == ("is new", "is gone")


# -- and with nothing else -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Discard:
    """`Drop` under other names, and with a field that is new."""

    file: Any
    to_cold: bool
    hint: str | None = None


def recording(*effects: Any, placement: Placement | None = None) -> Recording:
    made = Recording()
    made.took(placement or Placement(), TICK, list(effects))
    return made


def dropped(name: Any) -> Recording:
    return recording(Drop(snapshot=name, to_cold=False))


def test_a_renamed_class_has_the_form_that_it_had(monkeypatch):
    monkeypatch.setitem(BEFORE, "Discard", called("Drop", snapshot="file"))
    now = recording(Discard(SnapshotId("a"), to_cold=False))
    assert row({"a": now}) == row({"b": dropped(SnapshotId("a"))})
    assert row({"a": recording(Discard("a", to_cold=False, hint="b"))}) != row({"a": now})


def test_a_default_that_says_something_is_shown():
    """Else it could change unseen. Only None, false, zero and what is empty may be left out."""
    (line,) = dropped("a").lines
    assert orjson.loads(line) == [
        {"is": "TimerFired", "at": 1},
        [{"is": "Drop", "snapshot": "a", "to_cold": False}],
    ]
    asked = Recording()
    asked.took(Placement(), Arrived(at=0.0, request=RequestId("r1"), client=ClientId("anna")), [])
    (event, _) = orjson.loads(asked.lines[0])
    assert event["copies"] == 1
    assert "brief" not in event


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (frozenset({"a", "b", "c"}), frozenset({"c", "b", "a"})),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (0.1 + 0.2, nextafter(0.1 + 0.2, 1)),
        (1.0, 1),
    ],
)
def test_equal_content_has_one_form(one, other):
    assert dropped(one).lines == dropped(other).lines


@pytest.mark.parametrize(("one", "other"), [(1, 2), (0.3, 0.301), ("a", b"a"), (True, 1), ((), None)])
def test_other_content_has_another_form(one, other):
    assert dropped(one).lines != dropped(other).lines


def test_what_has_no_lasting_form_is_refused():
    """Else the address in its text would be part of the digest."""
    with pytest.raises(TypeError, match="object has no form that lasts"):
        dropped(object())


def test_schedulers_and_idle_work_are_numbered_as_they_appear():
    """The scheduler's own names for idle work may change; that two effects mean one piece of it may not."""

    def lines(first: str, second: str) -> list[bytes]:
        made, placements = Recording(), (Placement(), Placement())
        for placement, name in zip((0, 1, 0), (first, second, first), strict=True):
            made.took(placements[placement], TICK, [Stop(request=RequestId(name))])
        return made.lines

    assert lines("chore:1@2.000", "chore:2@3.000") == lines("save 7", "save 8")
    assert lines("chore:1@2.000", "chore:1@2.000") != lines("save 7", "save 8")
    assert orjson.loads(lines("a", "b")[1]) == [
        1,
        {"at": 1, "is": "TimerFired"},
        [{"is": "Stop", "request": "own 1"}],
    ]
