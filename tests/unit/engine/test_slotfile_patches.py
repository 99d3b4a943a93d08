"""New files from old ones: chosen checkpoints, and a repaired window, only if its whole table fits."""

from __future__ import annotations

import struct
from io import BytesIO

import pytest

from recipes import made, other_last_token, whole
from slotkeeper.engine.slotfile import Patch, keep, patched, repair_window, size_of
from unit.engine.slotfiles import (
    IDS,
    KINDS,
    WINDOW,
    attention,
    header,
    slot_file,
    whole_file,
)

N = len(IDS)


def repair(data: bytes, n_swa: int = WINDOW) -> Patch | None:
    return repair_window(BytesIO(data), whole_file(data), n_swa)


def windowed(positions: list[int], version: int = 4, *, slot: int = 0) -> bytes:
    full, window = attention(range(N), version, slot=slot), attention(positions, version, slot=slot)
    return header(IDS, version) + full + window


@pytest.mark.parametrize("version", [2, 4])
@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize("turn", [0, 3, 7])
def test_the_repair_moves_the_first_cell_of_the_window_back_by_one_position(
    version: int, slot: int, turn: int
) -> None:
    """The first cell may be anywhere: the window is a ring buffer."""
    positions = list(range(N - WINDOW, N))
    positions = positions[turn:] + positions[:turn]
    data = windowed(positions, version, slot=slot)
    patch = repair(data)
    assert patch is not None
    moved = [p - (p == N - WINDOW) for p in positions]
    repaired = made(patched(whole(whole_file(data)), patch), data)
    assert repaired == windowed(moved, version, slot=slot)
    assert repair(repaired) is None  # a repaired file is not repaired again


@pytest.mark.parametrize(
    "positions",
    [
        list(range(N - WINDOW, N - 1)),
        list(range(N - WINDOW - 1, N)),
        list(range(N - WINDOW - 1, N - 1)),
        [*range(N - WINDOW, N - 1), N - 2],
        [*range(N - WINDOW, N - 1), N],
        [*range(N - WINDOW, N - 1), -1],
    ],
)
def test_a_window_with_other_positions_is_not_repaired(positions: list[int]) -> None:
    assert repair(windowed(positions)) is None


@pytest.mark.parametrize("field", [4, 8])
def test_a_window_with_a_cell_of_another_sequence_is_not_repaired(field: int) -> None:
    data = bytearray(windowed(list(range(N - WINDOW, N))))
    table = whole_file(bytes(data)).caches[1].table
    data[table + 12 * 3 + field] += 1
    assert repair(bytes(data)) is None


@pytest.mark.parametrize("n_swa", [0, WINDOW - 1, WINDOW + 1, 1 << 30])
def test_a_window_of_another_size_than_that_of_the_model_is_not_repaired(n_swa: int) -> None:
    assert repair(slot_file("swa"), n_swa) is None


@pytest.mark.parametrize("n", [WINDOW - 1, WINDOW, WINDOW + 1])
def test_a_prompt_within_the_window_is_not_repaired(n: int) -> None:
    assert (repair(slot_file("swa", ids=IDS[:n])) is None) is (n <= WINDOW)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "swa"])
def test_states_of_other_memory_kinds_are_not_repaired(kind: str) -> None:
    assert repair(slot_file(kind), WINDOW) is None
    assert repair(slot_file(kind), N) is None


def test_a_window_with_longer_cells_is_not_repaired() -> None:
    full, window = attention(range(N), 4, extra=3), attention(range(N)[-WINDOW:], 4, extra=3)
    assert repair(header(IDS, 4) + full + window) is None


def test_a_file_that_was_truncated_is_not_repaired() -> None:
    data = slot_file("swa")
    file = whole_file(data)
    assert repair_window(BytesIO(data[: file.caches[1].table + 30]), file, WINDOW) is None


def test_patches_can_be_combined_with_any_recipe() -> None:
    data = slot_file("swa", cuts=(4, 16))
    file = whole_file(data)
    patch = repair(data)
    assert patch is not None
    both = patched(keep(file, file.records[1:]), patch, other_last_token(file, 7))
    expected = bytearray(slot_file("swa", ids=(*IDS[:-1], 7), cuts=(16,)))
    expected[patch.offset : patch.offset + 4] = struct.pack("<i", N - WINDOW - 1)
    assert made(both, data) == bytes(expected)


def test_a_patch_outside_the_copied_bytes_is_refused() -> None:
    file = whole_file(slot_file("hybrid", cuts=(4,)))
    for offset in (file.payload_end - 3, file.payload_end, file.size):
        with pytest.raises(ValueError, match="does not copy"):
            patched(keep(file, ()), Patch(offset, b"1234"))


def test_a_patch_at_the_beginning_or_end_leaves_no_empty_piece() -> None:
    file = whole_file(slot_file("hybrid"))
    recipe = patched(whole(file), Patch(0, b"1234"), Patch(file.size - 4, b"5678"))
    assert [len(piece) if isinstance(piece, bytes) else piece.length for piece in recipe] == [
        4,
        file.size - 8,
        4,
    ]


def test_only_the_chosen_checkpoints_are_kept() -> None:
    data = slot_file("hybrid", cuts=(4, 8, 16))
    file = whole_file(data)
    recipe = keep(file, [file.records[2], file.records[0]])
    trimmed = made(recipe, data)
    assert trimmed == slot_file("hybrid", cuts=(4, 16))
    assert size_of(recipe) == len(trimmed)
    assert made(keep(file, ()), data) == slot_file("hybrid"), "without checkpoints there is no appendix"


def test_a_checkpoint_that_is_not_in_its_file_is_refused() -> None:
    file, other = whole_file(slot_file("hybrid", cuts=(4,))), whole_file(slot_file("hybrid", cuts=(8,)))
    with pytest.raises(ValueError, match="no such checkpoint"):
        keep(file, other.records)
