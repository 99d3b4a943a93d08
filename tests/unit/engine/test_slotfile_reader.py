"""A complete slot file is read to its end; a cut or changed one fails, or has another layout."""

from __future__ import annotations

import random
import struct
from io import BytesIO

import pytest

from slotkeeper.engine.slotfile import Damage, SlotFile, Verdict, read
from slotkeeper.scheduler.prompts.tokens import Tokens
from unit.engine.slotfiles import (
    IDS,
    KINDS,
    WINDOW,
    appendix,
    attention,
    header,
    payload,
    record,
    recurrent,
    slot_file,
    verdict_on,
    whole_file,
)

both_versions = pytest.mark.parametrize("version", [2, 3, 4])
all_kinds = pytest.mark.parametrize("kind", KINDS)


@both_versions
@all_kinds
def test_a_whole_file_is_read_to_its_end(kind: str, version: int) -> None:
    data = slot_file(kind, version)
    file = whole_file(data)
    assert (file.version, file.tokens, file.records) == (version, Tokens(IDS), ())
    assert file.payload_end == file.size == len(data)
    assert file.caches[-1].end == len(data)
    assert [cache.recurrent for cache in file.caches] == {
        "swa": [False, False],
        "hybrid": [False, True],
        "recurrent": [True],
    }.get(kind, [False])


@all_kinds
def test_checkpoints_are_listed_with_their_offsets(kind: str) -> None:
    data = slot_file(kind) + appendix([record(4, draft=b"draft"), record(16, first=0)])
    file = whole_file(data)
    assert file.payload_end == len(slot_file(kind))
    assert [(r.at, r.pos_min, r.pos_max, r.draft) for r in file.records] == [
        (4, 3, 3, True),
        (16, 0, 15, False),
    ]
    assert [r.length for r in file.records] == [40 + 4 + 5, 40 + 16]
    assert file.records[-1].offset + file.records[-1].length == file.size == len(data)
    assert repr(file) == f"<SlotFile v4 20 tokens {len(data)} bytes checkpoints [4, 16]>"


@both_versions
@all_kinds
def test_the_layout_depends_on_the_engine_and_not_on_the_tokens(kind: str, version: int) -> None:
    layout = whole_file(slot_file(kind, version)).layout
    assert layout
    assert whole_file(slot_file(kind, version, range(1, 40))).layout == layout
    assert whole_file(slot_file(kind, version, slot=1)).layout == layout


def test_engines_with_other_flags_have_another_layout() -> None:
    start = header(IDS, 4)
    every = range(len(IDS))
    files = [
        *(slot_file(kind) for kind in KINDS),
        start + attention(every, 4, streams=1),
        start + attention(every, 4, streams=4),
        start + attention(every, 4, row=8),
        start + attention(every, 4, extra=3),
        start + attention(every, 4, extra=2),
    ]
    assert len({whole_file(data).layout for data in files}) == len(files)


def test_a_file_without_tokens_has_no_layout() -> None:
    file = whole_file(header((), 2) + struct.pack("<III", 2, 0, 0))
    assert (file.tokens, file.layout) == (Tokens(), "")


@both_versions
@all_kinds
def test_every_truncation_is_detected_or_changes_the_layout(kind: str, version: int) -> None:
    """A cut between two memories, or keys and values, leaves a complete file of another layout."""
    data = slot_file(kind, version)
    file = whole_file(data)
    passed = []
    for length in range(len(data)):
        found = verdict_on(data[:length])
        if isinstance(found, SlotFile):
            assert found.layout != file.layout
            passed.append(length)
    between = {cache.end for cache in file.caches[:-1]}
    keys_only = {"dense": 1, "swa": 2}.get(kind, 0)  # per attention memory that has values in rows
    assert between <= set(passed)
    assert len(passed) <= len(between) + keys_only


def test_every_truncation_in_the_appendix_is_detected_except_before_its_first_byte() -> None:
    data = slot_file("hybrid", cuts=(4, 16))
    end = whole_file(data).payload_end
    passed = [n for n in range(end, len(data)) if isinstance(verdict_on(data[:n]), SlotFile)]
    assert passed == [end]


@all_kinds
def test_a_file_of_another_length_than_reported_is_torn(kind: str) -> None:
    data = slot_file(kind)
    for size in (0, len(data) - 1, len(data) + 1, 1 << 40):
        found = read(BytesIO(data), size)
        assert isinstance(found, Damage)
        assert found.verdict is Verdict.TORN


@both_versions
@all_kinds
def test_bytes_behind_the_end_are_detected(kind: str, version: int) -> None:
    for more in (b"\0", b"\0" * 4, b"SCKX", b"\1\0\0\0" * 4, bytes(64), b"x" * 64):
        found = verdict_on(slot_file(kind, version) + more)
        assert isinstance(found, Damage)
        assert found.verdict is Verdict.TORN


@pytest.mark.parametrize(
    ("data", "verdict"),
    [
        (b"", Verdict.FOREIGN),
        (b"qsgg", Verdict.FOREIGN),
        (bytes(64), Verdict.FOREIGN),
        (b"GGUF" + bytes(64), Verdict.FOREIGN),
        (header(IDS, 5), Verdict.VERSION),
        (header(IDS, 5) + payload("dense", 20, 4), Verdict.VERSION),
        (header((7, -1, 8), 4) + payload("dense", 3, 4), Verdict.TOKENS),
        (header(IDS, 4)[:-4] + b"\1\0\0\0" + payload("dense", 20, 4), Verdict.TOKENS),
        (header(IDS, 4)[:-4] + b"\xff\xff\xff\x7f" + payload("dense", 20, 4), Verdict.TOKENS),
        (struct.pack("<IIIiii", 0x67677371, 4, 24, -1, 1, 19) + bytes(84), Verdict.TOKENS),
        (struct.pack("<IIIiii", 0x67677371, 4, 24, 0, 1, 20) + bytes(84), Verdict.TOKENS),
        (struct.pack("<IIIiii", 0x67677371, 4, 2**31, -1, 1, 2**31 - 4), Verdict.TOKENS),
        (struct.pack("<IIIiii", 0x67677371, 4, 2**20 + 4, -1, 1, 2**20), Verdict.TORN),
        (header(IDS, 4), Verdict.TORN),
    ],
)
def test_each_bad_header_has_its_verdict(data: bytes, verdict: Verdict) -> None:
    found = verdict_on(data)
    assert isinstance(found, Damage)
    assert found.verdict is verdict
    assert "\n" not in found.text


@pytest.mark.parametrize(
    "bad",
    [
        appendix([record(4), record(4)]),  # two at the same token
        appendix([record(21)]),  # more tokens than the file has
        appendix([record(0)]),
        appendix([struct.pack("<qii", 3, 15, 15) + bytes(24)]),  # this one aborts the engine
        appendix([struct.pack("<qii", 16, 16, 15) + bytes(24)]),
        appendix([record(4)]) + b"junk",
        struct.pack("<4sII", b"SCKP", 2, 0),
        struct.pack("<4sII", b"SCKP", 1, 2**31),
    ],
)
def test_contradictory_checkpoints_are_refused(bad: bytes) -> None:
    found = verdict_on(slot_file("hybrid") + bad)
    assert isinstance(found, Damage)
    assert found.verdict is Verdict.APPENDIX


def test_an_unknown_structure_has_no_layout_but_its_checkpoints_are_found() -> None:
    unknown = random.Random(3).randbytes(9 << 20)  # longer than what is searched at once
    start = header(IDS, 4) + b"\0\0\0\0" + unknown
    plain = whole_file(start)
    assert (plain.layout, plain.caches, plain.records, plain.payload_end) == ("", (), (), len(start))
    false_hit = b"SCKP\1\0\0\0\2\0\0\0"
    found = whole_file(start + false_hit + appendix([record(4), record(16)]))
    assert (found.layout, [r.at for r in found.records]) == ("", [4, 16])
    assert found.payload_end == len(start) + len(false_hit)


def test_the_search_finds_an_appendix_across_two_search_blocks() -> None:
    start = header(IDS, 4)
    for shift in range(8):
        filler = b"\0\0\0\0" + b"\xff" * ((4 << 20) - 4 - shift)
        assert [r.at for r in whole_file(start + filler + appendix([record(4)])).records] == [4]


def test_a_model_with_all_memory_kinds_is_read() -> None:
    n = len(IDS)
    data = header(IDS, 4) + attention(range(n), 4) + attention(range(n)[-WINDOW:], 4) + recurrent(n - 1)
    assert [cache.recurrent for cache in whole_file(data).caches] == [False, False, True]


def test_a_file_with_many_possible_readings_takes_bounded_time() -> None:
    empty = struct.pack("<I", 256) + bytes(4 * 256)  # a memory of 256 empty streams, of any kind of cells
    found = verdict_on(header(IDS, 4) + empty * 5)
    assert isinstance(found, Damage)
    assert found.verdict is Verdict.TORN


def test_a_state_with_two_sequences_has_no_layout() -> None:
    one = attention(range(4), 4, streams=1)[4:]
    data = header(IDS[:4], 4) + struct.pack("<I", 2) + one + one
    assert whole_file(data).layout == ""


@pytest.mark.parametrize(
    ("kind", "behind"),
    [("dense", 8), ("dense", 16), ("transposed", 16 + 2 * (12 + 16 * len(IDS)) + 4)],
    ids=["rotation", "type", "element"],
)
def test_fields_that_no_model_has_give_no_layout(kind: str, behind: int) -> None:
    data = bytearray(slot_file(kind))
    at = whole_file(bytes(data)).caches[0].table + 12 * len(IDS) + behind
    data[at : at + 4] = b"\xff" * 4
    assert whole_file(bytes(data)).layout == ""


def test_a_file_that_is_truncated_while_it_is_read_is_torn() -> None:
    class Shrinking(BytesIO):
        def seek(self, offset: int, whence: int = 0) -> int:
            place = super().seek(offset, whence)
            if offset > 200:  # the ids were read
                self.truncate(200)
            return place

    data = slot_file("hybrid")
    found = read(Shrinking(data), len(data))
    assert isinstance(found, Damage)
    assert found.verdict is Verdict.TORN
