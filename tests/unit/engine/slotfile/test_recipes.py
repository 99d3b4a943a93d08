"""New files from old ones: only the checkpoints that are wanted, and only such as the engine survives."""

from __future__ import annotations

from io import BytesIO

import pytest

from slotkeeper.engine.slotfile import ByteSpan, Donor, apply, graft, keep, size_of, whole
from unit.engine.slotfile.built import IDS, KINDS, made, slot_file, whole_file

OTHER = (*IDS[:12], *range(500, 515))  # shares 12 tokens with IDS


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_file_is_copied_as_it_is(kind: str) -> None:
    data = slot_file(kind, cuts=(4, 16))
    file = whole_file(data)
    assert made(whole(file), data) == data
    assert made(keep(file, file.records), data) == data
    assert size_of(whole(file)) == len(data)


def test_only_the_chosen_checkpoints_are_kept() -> None:
    data = slot_file("hybrid", cuts=(4, 8, 16))
    file = whole_file(data)
    recipe = keep(file, [file.records[2], file.records[0]])
    trimmed = made(recipe, data)
    assert trimmed == slot_file("hybrid", cuts=(4, 16))
    assert size_of(recipe) == len(trimmed)


def test_without_checkpoints_there_is_no_appendix() -> None:
    data = slot_file("hybrid", cuts=(4, 16))
    assert made(keep(whole_file(data), ()), data) == slot_file("hybrid")


def test_another_files_checkpoints_are_put_in_their_place() -> None:
    mine, others = slot_file("hybrid", cuts=(4, 16)), slot_file("hybrid", ids=OTHER, cuts=(8, 12, 20))
    file, other = whole_file(mine), whole_file(others)
    donor = Donor(source=1, file=other, records=other.records[:2])
    grafted = made(graft(file, file.records[1:], [donor]), mine, others)
    assert grafted == slot_file("hybrid", cuts=(8, 12, 16))
    assert whole_file(grafted).tokens == file.tokens


def test_checkpoints_of_several_files_are_sorted_by_their_tokens() -> None:
    sources = [slot_file("swa", cuts=(cut,)) for cut in (16, 8, 12, 4)]
    read = [whole_file(source) for source in sources]
    donors = [Donor(source=i, file=read[i], records=read[i].records) for i in (1, 2, 3)]
    assert made(graft(read[0], read[0].records, donors), *sources) == slot_file("swa", cuts=(4, 8, 12, 16))


def test_a_checkpoint_of_other_tokens_is_refused() -> None:
    file, other = whole_file(slot_file("hybrid")), whole_file(slot_file("hybrid", ids=OTHER, cuts=(12, 13)))
    graft(file, (), [Donor(source=1, file=other, records=other.records[:1])])
    with pytest.raises(ValueError, match="do not share their first 13 tokens"):
        graft(file, (), [Donor(source=1, file=other, records=other.records)])


def test_a_checkpoint_behind_the_files_end_is_refused() -> None:
    file, longer = (
        whole_file(slot_file("hybrid")),
        whole_file(slot_file("hybrid", ids=(*IDS, 1, 2), cuts=(20, 21))),
    )
    graft(file, (), [Donor(source=1, file=longer, records=longer.records[:1])])
    with pytest.raises(ValueError, match="do not share their first 21 tokens"):
        graft(file, (), [Donor(source=1, file=longer, records=longer.records[1:])])


def test_two_checkpoints_at_one_place_are_refused() -> None:
    file = whole_file(slot_file("hybrid", cuts=(4, 8)))
    with pytest.raises(ValueError, match="two checkpoints at one place"):
        graft(file, file.records, [Donor(source=1, file=file, records=file.records[1:])])


@pytest.mark.parametrize("stranger", [slot_file("swa", cuts=(4,)), slot_file("recurrent", cuts=(4,))])
def test_a_checkpoint_of_another_engine_is_refused(stranger: bytes) -> None:
    file, other = whole_file(slot_file("hybrid")), whole_file(stranger)
    with pytest.raises(ValueError, match="not of the same engine"):
        graft(file, (), [Donor(source=1, file=other, records=other.records)])


def test_a_file_of_the_older_version_gets_no_checkpoints() -> None:
    old, new = whole_file(slot_file("recurrent", 2)), whole_file(slot_file("recurrent", 4, cuts=(4,)))
    with pytest.raises(ValueError, match="not of the same engine"):
        graft(old, (), [Donor(source=1, file=new, records=new.records)])


def test_a_checkpoint_that_is_not_in_its_file_is_refused() -> None:
    file, other = whole_file(slot_file("hybrid", cuts=(4,))), whole_file(slot_file("hybrid", cuts=(8,)))
    with pytest.raises(ValueError, match="no such checkpoint"):
        keep(file, other.records)
    with pytest.raises(ValueError, match="no such checkpoint"):
        graft(file, (), [Donor(source=1, file=other, records=file.records)])


def test_source_0_is_no_donor() -> None:
    file = whole_file(slot_file("hybrid", cuts=(4,)))
    with pytest.raises(ValueError, match="source 0"):
        graft(file, (), [Donor(source=0, file=file, records=file.records)])


def test_a_source_that_became_shorter_is_seen() -> None:
    with pytest.raises(EOFError, match="source 0 ends 1 bytes early"):
        apply((ByteSpan(0, 0, 5),), [BytesIO(b"1234")], BytesIO().write)


def test_a_large_piece_is_copied_in_chunks() -> None:
    data, written = bytes(range(256)) * (5 << 12), list[bytes]()
    apply((ByteSpan(0, 1, len(data) - 1),), [BytesIO(data)], written.append)
    assert len(written) == 2
    assert b"".join(written) == data[1:]
