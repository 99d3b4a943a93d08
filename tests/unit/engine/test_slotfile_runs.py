"""Slot files in parts: together they are the file, and a state that grew has the parts that it had before."""

from __future__ import annotations

import sys
from dataclasses import replace
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotkeeper.engine.slotfile import AS_THEY_ARE, RUN, PartSizes, divided
from unit.engine.slotfiles import WINDOW, division_of, joined, parts_of, picked, slot_file, whole_file

DIVIDED = ("dense", "latent", "swa", "hybrid", "recurrent")


def of(kind: str, n: int, **more: object) -> bytes:
    return slot_file(kind, ids=range(n), seed=1, **more)  # type: ignore[arg-type]


@given(
    kind=st.sampled_from(DIVIDED),
    version=st.sampled_from([2, 3, 4]),
    n=st.integers(RUN + 1, 4 * RUN),
    cuts=st.lists(st.integers(1, RUN), max_size=3, unique=True),
    order=st.randoms(use_true_random=False),
    sizes=st.builds(
        PartSizes, least=st.sampled_from([0, 300, 12_000]), most=st.sampled_from([100, 12_000, sys.maxsize])
    ),
)
def test_parts_and_frame_together_are_the_file_byte_for_byte(*, kind, version, n, cuts, order, sizes):
    """In whatever order the cells of a window are, which is a ring, and however large parts should be."""
    window = [*range(n - order.randrange(1, n), n)]
    turn = order.randrange(len(window))
    window = window[turn:] + window[:turn]
    if order.random() < 0.2:
        order.shuffle(window)
    data = slot_file(
        kind, version, range(n), cuts=cuts if version == 4 else (), slot=1, seed=1, window=window
    )
    division, parts = division_of(data, sizes), parts_of(data, sizes)
    assert [len(part) for part in parts] == division.sizes
    frame = picked(data, division.frame)
    assert len(frame) + sum(map(len, parts)) == len(data)
    assert joined(data, sizes) == data
    offset = order.randrange(len(data))
    place = division.find(offset)
    source = frame if place.part is None else parts[place.part]
    assert source[place.at : place.at + place.length] == data[offset : offset + place.length]


def test_a_window_that_has_moved_has_the_runs_that_it_kept():
    """Its cells are a ring of three runs."""

    def window(end: int) -> list[int]:
        return [next(p for p in range(end - 1, -1, -1) if p % (3 * RUN) == cell) for cell in range(3 * RUN)]

    before = parts_of(of("swa", 4 * RUN, window=window(4 * RUN)))
    after = parts_of(of("swa", 5 * RUN, window=window(5 * RUN)))
    assert len(before[4:]) == len(after[5:]) == 3
    assert len(set(before[4:]) & set(after[5:])) == 2


ROW = 64  # bytes of a token in all layers of the dense files


def test_parts_have_at_least_and_at_most_the_bytes_that_are_wanted():
    n = 10 * RUN
    larger = division_of(of("dense", n, cuts=(100,)), PartSizes(least=3 * RUN * ROW))
    assert larger.sizes == [4 * RUN * ROW] * 2, "a smaller run and the checkpoint are in the frame"
    smaller = division_of(of("dense", n, cuts=(100,)), PartSizes(most=40 * ROW))
    assert smaller.sizes[:-1] == [32 * ROW] * (n // 32)
    cut = division_of(of("hybrid", n, cuts=(1000,)), PartSizes(most=400))
    assert cut.sizes[-3:] == [400, 400, 1045 - 800], "a checkpoint in pieces"


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        *((kind, AS_THEY_ARE) for kind in ("dense", "latent", "hybrid")),
        ("dense", PartSizes(least=3 * RUN * ROW)),
        ("dense", PartSizes(most=40 * ROW)),
    ],
)
def test_a_state_that_grew_has_all_finished_runs_of_before_also_in_another_slot(kind: str, sizes: PartSizes):
    before, after = parts_of(of(kind, 9 * RUN + 50), sizes), parts_of(of(kind, 13 * RUN, slot=1), sizes)
    finished = [part for part in before if len(part) == len(before[0])]
    assert len(finished) >= 2
    assert set(before) & set(after) == set(finished)


def test_each_checkpoint_is_a_part():
    before, after = parts_of(of("dense", 300, cuts=(100, 200))), parts_of(of("dense", 300, cuts=(200, 250)))
    assert len(set(before) & set(after)) == len(before) - 1 == len(after) - 1


def test_cells_in_no_order_make_no_more_runs_than_in_order():
    n = 6 * RUN
    mixed = sorted(range(n), key=lambda position: position * 97 % n)
    assert len(parts_of(of("swa", n, window=mixed))) == 2 * len(parts_of(of("dense", n)))


def test_files_that_are_not_understood_and_short_ones_stay_whole():
    for data in (of("transposed", 300), of("dense", RUN), of("swa", WINDOW)):
        assert divided(BytesIO(data), whole_file(data)) is None
    data = of("hybrid", 300)
    assert divided(BytesIO(data), replace(whole_file(data), caches=())) is None
