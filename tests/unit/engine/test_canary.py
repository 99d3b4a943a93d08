"""Conclusions of the probe from a slot file that an engine has written."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from slotkeeper.engine.answers import NO_FILES, NoFilesError, Why
from slotkeeper.engine.file_canary import inspected, quietest, removed, temporary
from slotkeeper.scheduler.types import SlotId, SlotView
from slotkeeper.store import files

EMPTY = struct.pack("<7I", 0x67677371, 4, 4, 0xFFFFFFFF, 1, 0, 0) + struct.pack(
    "<2I", 1, 0
)  # of a dense slot


def refusal(path: Path, written: int) -> NoFilesError:
    with pytest.raises(NoFilesError) as refused:
        inspected(path, written)
    return refused.value


def test_the_name_of_a_probe_file_is_one_that_the_store_removes():
    assert files.is_temporary(temporary())
    assert temporary() != temporary()


def test_the_file_of_an_empty_slot_shows_its_format_version(tmp_path):
    path = tmp_path / "state"
    path.write_bytes(EMPTY)
    assert inspected(path, len(EMPTY)).version == 4
    assert "36 of 40 bytes" in str(refusal(path, len(EMPTY) + 4))


def test_every_probe_failure_has_a_reason_and_advice(tmp_path):
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


def test_the_probe_saves_the_idle_slot_with_the_fewest_tokens():
    def slot(number: int, held: int | None, *, busy: bool = False) -> SlotView:
        return SlotView(slot=SlotId(number), busy=busy, held=held)

    assert quietest((slot(0, 500), slot(1, None), slot(2, 0))) == 1
    assert quietest((slot(0, 500), slot(1, 20, busy=True), slot(2, 400))) == 2
    with pytest.raises(NoFilesError) as refused:
        quietest((slot(0, None, busy=True),))
    assert refused.value.why is Why.BUSY
