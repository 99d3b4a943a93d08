"""How many bytes of snapshots a folder may hold by default, and how many are written in an hour."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as some

from slotkeeper.scheduler.snapshots.budgets import (
    GIB,
    UNLIMITED,
    Budgets,
    FolderRoom,
    HourlyBudget,
    Limits,
    budgets,
)
from slotkeeper.scheduler.types import Tier

TIB = 1024 * GIB
TINY_MODEL = GIB // 256  # bytes of a full slot


def room(total: float, free: float | None = None, **more) -> FolderRoom:
    return FolderRoom(total=int(total), free=int(total if free is None else free), **more)


def of_disk(total: float, free: float | None = None, *, largest: float = 0, **more) -> Budgets:
    return budgets(Limits(), {Tier.HOT: room(total, free, **more)}, int(largest))


@pytest.mark.parametrize(
    ("disk", "largest", "wanted"),
    [
        ((1 * GIB, 1 * GIB), TINY_MODEL, (GIB / 4, GIB / 16, 64)),
        ((32 * GIB, 20 * GIB), 2 * GIB, (8 * GIB, 8 * GIB, 4)),  # four states, although a share is 5 GiB
        ((32 * GIB, 20 * GIB), 4 * GIB, (10 * GIB, 10 * GIB, 2)),  # four would take more than half
        ((32 * GIB, 20 * GIB), 9 * GIB, (10 * GIB, 10 * GIB, 1)),
        ((1 * TIB, 512 * GIB), 16 * GIB, (128 * GIB, 64 * GIB, 8)),
        ((4 * TIB, 4 * TIB), 16 * GIB, (1 * TIB, 256 * GIB, 64)),
        ((1 * TIB, 0), 16 * GIB, (0, 64 * GIB, 0)),  # full, and nothing of it is ours
        ((1 * TIB, 512 * GIB), 0, (128 * GIB, 64 * GIB, None)),
    ],
)
def test_a_disk_gives_a_share_of_what_is_free_or_room_for_four_states(disk, largest, wanted):
    found = of_disk(*disk, largest=largest)
    assert (found.hot, found.hourly, found.fits) == wanted
    assert found.cold == 0, "there is no cold folder"


def test_memory_gives_half_as_much_and_does_not_wear_out():
    memory = of_disk(64 * GIB, 32 * GIB, in_memory=True)
    assert (memory.hot, memory.hourly) == (4 * GIB, UNLIMITED)
    assert of_disk(64 * GIB, 32 * GIB, in_memory=True, largest=16 * GIB).hot == 8 * GIB


def test_before_a_slot_folder_in_memory_the_disk_behind_it_limits_the_writes():
    rooms = {Tier.HOT: room(64 * GIB, in_memory=True), Tier.COLD: room(2 * TIB, device=1)}
    found = budgets(Limits(cold_bytes=None), rooms)
    assert (found.hot, found.cold, found.hourly) == (8 * GIB, TIB // 2, 128 * GIB)


def test_values_of_the_user_stay_as_they_are():
    given_ = Limits(hot_bytes=3, cold_bytes=2, hourly_bytes=0)
    found = budgets(given_, {Tier.HOT: room(TIB), Tier.COLD: room(TIB)}, 16 * GIB)
    assert (found.hot, found.cold, found.hourly) == (3, 2, 0)


def test_a_folder_that_cannot_be_measured_has_no_limit_and_shows_none():
    found = budgets(Limits(), {})
    assert (found.hot, found.hourly, found.shown(Tier.HOT), found.shown(Tier.COLD)) == (
        UNLIMITED, UNLIMITED, None, 0,
    )  # fmt: skip


@pytest.mark.parametrize(("fits", "small"), [(0, True), (1, True), (2, False), (5, False)])
def test_room_for_fewer_than_two_conversations_is_said_with_what_to_set(fits, small):
    found = Budgets(hot=fits * 3 * GIB, cold=0, hourly=0, largest=3 * GIB)
    assert (found.fits, found.small) == (fits, small)
    assert ("--hot-bytes 6GiB" in found.advice) == small
    assert not Budgets(hot=0, cold=0, hourly=0).small, "how large a state is, is not known"


sizes = some.integers(0, 8 * TIB)


@given(sizes, sizes, sizes, some.booleans(), some.booleans())
def test_the_default_budgets_never_fill_a_disk(total, free, largest, in_memory, one_disk):
    free = min(total, free)
    hot = room(total, free, in_memory=in_memory)
    cold = room(total, free, device=0 if one_disk else 1, in_memory=in_memory and one_disk)
    found = budgets(Limits(cold_bytes=None), {Tier.HOT: hot, Tier.COLD: cold}, largest)
    together = found.hot + found.cold if one_disk else max(found.hot, found.cold)
    assert 0 <= together <= free / 2
    assert found.hourly >= 0


def test_a_change_is_noticeable_from_a_quarter_on_or_if_few_states_fit():
    base = Budgets(hot=100, cold=0, hourly=100, largest=10)
    assert not base.differ(base)
    assert not Budgets(hot=80, cold=0, hourly=90, largest=10).differ(base)
    assert Budgets(hot=70, cold=0, hourly=100, largest=10).differ(base)
    few = Budgets(hot=100, cold=0, hourly=100, largest=90)
    assert few.differ(base)
    assert not base.differ(few), "it must not be said again each minute that the two change places"


def test_the_budget_of_an_hour_may_be_spent_at_once_and_then_refills():
    budget = HourlyBudget(3600, left=3600, at=0.0)
    assert budget.spend(3600, 0.0)
    assert not budget.spend(1, 0.5)
    assert budget.spend(100, 100.5)


@pytest.mark.parametrize(("size", "seconds"), [(0, 0.0), (3600, 3600.0), (3601, inf), (100, 100.0)])
def test_the_hourly_budget_says_how_long_a_write_must_wait(size, seconds):
    budget = HourlyBudget(3600, left=0.0, at=50.0)
    assert budget.wait(size, 50.0) == seconds


def test_without_a_budget_no_write_is_allowed():
    assert HourlyBudget(0, left=0.0, at=0.0).wait(1, 10_000.0) == inf


def test_another_hourly_budget_never_gives_more_than_an_hour_at_once():
    budget = HourlyBudget(UNLIMITED, left=UNLIMITED, at=0.0)
    budget.becomes(3600)
    assert budget.spend(3600, 0.0)
    budget.becomes(7200)
    assert budget.wait(100, 0.0) == 50.0
