"""Any bytes give a verdict: no exception, in bounded time and memory."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from recipes import IDS_AT, whole
from slotkeeper.engine.slotfile import Damage, SlotFile, Verdict, keep, size_of
from unit.engine.slotfiles import KINDS, header, slot_file, verdict_on

files = st.sampled_from([slot_file(kind, version) for kind in KINDS for version in (2, 4)])
with_checkpoints = st.sampled_from([slot_file(kind, cuts=(4, 16)) for kind in KINDS])


def check(data: bytes) -> None:
    found = verdict_on(data)
    if isinstance(found, Damage):
        assert found.verdict in Verdict
        assert found.text
        return
    assert isinstance(found, SlotFile)
    assert found.payload_end <= found.size == len(data)
    assert IDS_AT + 4 * len(found.tokens) <= found.payload_end
    assert all(0 < record.at <= len(found.tokens) for record in found.records)
    assert size_of(whole(found)) == size_of(keep(found, found.records)) or not found.records


@given(st.sampled_from([b"", header((1, 2, 3), 2), header((1, 2, 3), 4)]), st.binary(max_size=400))
def test_reading_any_bytes_behind_a_valid_header_or_none_gives_a_verdict(head: bytes, data: bytes) -> None:
    check(head + data)


@given(st.one_of(files, with_checkpoints), st.data())
def test_reading_a_file_with_any_changed_count_takes_bounded_memory(data: bytes, draw: st.DataObject) -> None:
    at = 4 * draw.draw(st.integers(0, len(data) // 4 - 1))
    value = draw.draw(st.integers(0, 2**32 - 1))
    tracemalloc.start()
    try:
        check(data[:at] + value.to_bytes(4, "little") + data[at + 4 :])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(st.one_of(files, with_checkpoints), st.binary(max_size=40), st.data())
def test_reading_a_file_with_changed_inserted_or_removed_bytes_gives_a_verdict(
    data: bytes, more: bytes, draw: st.DataObject
) -> None:
    at = draw.draw(st.integers(0, len(data)))
    left_out = draw.draw(st.one_of(st.just(len(more)), st.integers(0, len(data) - at)))
    check(data[:at] + more + data[at + left_out :])
