"""What the probe concludes from a file that an engine has written, and what it remembers."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from slotkeeper.engine.answers import NO_FILES, NoFilesError, Why
from slotkeeper.engine.canary import inspected, quietest, removed, temporary
from slotkeeper.scheduler.types import SlotId, SlotView
from slotkeeper.store import files

EMPTY = struct.pack("<7I", 0x67677371, 4, 4, 0xFFFFFFFF, 1, 0, 0) + struct.pack(
    "<2I", 1, 0
)  # of a dense slot


def refusal(path: Path, written: int) -> NoFilesError:
    with pytest.raises(NoFilesError) as refused:
        inspected(path, written)
    return refused.value


def test_what_we_cannot_clear_away_the_store_does():
    assert files.is_temporary(temporary())
    assert temporary() != temporary()


def test_the_state_of_an_empty_slot_tells_its_version(tmp_path):
    path = tmp_path / "state"
    path.write_bytes(EMPTY)
    assert inspected(path, len(EMPTY)).version == 4
    assert "36 of 40 bytes" in str(refusal(path, len(EMPTY) + 4))


def test_every_trouble_has_a_name_and_an_advice(tmp_path):
    path = tmp_path / "state"
    assert refusal(path, 9).why is Why.NOT_SHARED
    path.write_bytes(b"something else")
    assert refusal(path, 9).why is Why.CUT
    assert refusal(path, 14).why is Why.UNKNOWN
    path.unlink()
    path.mkdir()
    assert refusal(path, path.stat().st_size).why is Why.UNREADABLE
    with pytest.raises(NoFilesError) as refused:
        removed(path)
    assert refused.value.why is Why.UNREADABLE
    assert set(NO_FILES) == set(Why)


def test_the_smallest_idle_state_is_the_one_to_save():
    def slot(number: int, held: int | None, *, busy: bool = False) -> SlotView:
        return SlotView(slot=SlotId(number), busy=busy, held=held)

    assert quietest((slot(0, 500), slot(1, None), slot(2, 0))) == 1
    assert quietest((slot(0, 500), slot(1, 20, busy=True), slot(2, 400))) == 2
    with pytest.raises(NoFilesError) as refused:
        quietest((slot(0, None, busy=True),))
    assert refused.value.why is Why.BUSY
