"""The accounts of parts: every stored byte counts once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slotkeeper.scheduler.slots.engine_model import SnapshotId
from slotkeeper.store.folders.run_folder import Shares

NAMES = st.sampled_from("abcdefgh")
SIZES = {name: 10 ** (number % 4) + number for number, name in enumerate("abcdefgh")}
STEPS = st.lists(st.tuples(st.integers(0, 5), st.sets(NAMES) | st.none() | st.integers(0, 2000)), max_size=30)


@given(STEPS)
def test_every_part_counts_once_whatever_comes_and_goes(steps):
    shares, there, disk = Shares(), dict[SnapshotId, set[str]](), set[str]()
    for number, step in steps:
        snapshot = SnapshotId(f"{number}")
        if isinstance(step, set):
            if snapshot not in there:
                there[snapshot] = step
                disk |= step
            shares.add(snapshot, {name: SIZES[name] for name in step})
        elif step is None:
            held = set().union(*(names for id_, names in there.items() if id_ != snapshot))
            assert set(shares.drop(snapshot)) == there.pop(snapshot, set()) - held
        else:
            for name in shares.beyond(step):
                shares.gone(name)
                disk.remove(name)
            kept = set().union(*there.values())
            assert kept <= disk
            assert shares.total <= step or disk == kept
        assert shares.total == sum(SIZES[name] for name in disk)
        owners = {
            name: max(id_ for id_, names in there.items() if name in names)
            for name in set().union(*there.values())
        }
        for id_ in there:
            assert shares.own(id_) == sum(SIZES[name] for name, owner in owners.items() if owner == id_)


def test_the_oldest_leftovers_go_first():
    shares = Shares()
    for name in "bca":
        shares.left(name, 10)
    assert list(shares.beyond(15)) == ["b", "c"]
