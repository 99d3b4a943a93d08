"""New files from old ones: only the chosen checkpoints, and only those that do not crash the engine."""

from __future__ import annotations

import pytest

from recipes import made, whole
from slotkeeper.engine.slot_file.slotfile import keep, size_of
from unit.engine.slotfiles import KINDS, slot_file, whole_file


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_file_is_copied_unchanged(kind: str) -> None:
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


def test_a_file_without_checkpoints_has_no_appendix() -> None:
    data = slot_file("hybrid", cuts=(4, 16))
    assert made(keep(whole_file(data), ()), data) == slot_file("hybrid")


def test_a_checkpoint_that_is_not_in_its_file_is_refused() -> None:
    file, other = whole_file(slot_file("hybrid", cuts=(4,))), whole_file(slot_file("hybrid", cuts=(8,)))
    with pytest.raises(ValueError, match="no such checkpoint"):
        keep(file, other.records)
