"""Budgets for snapshots that follow the disk and the model: when they change, and what has to go."""

from __future__ import annotations

from typing import Any

from playbooks.playbook import (
    NEW_FILES,
    TOKEN_BYTES,
    Expected,
    Play,
    drops,
    engine_up,
    one_turn,
    saved,
    saves,
    sees,
    snapshot,
    snapshots_changed,
)
from slotkeeper.scheduler.effects import Budgeted
from slotkeeper.scheduler.events import RoomSeen
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.snapshots.budgets import FolderRoom, Limits
from slotkeeper.scheduler.types import Tier

A, B = (Tokens(range(n, n + 1000)) for n in (10_000, 20_000))
S1, S2 = snapshot("s1", A), snapshot("s2", B)
SIZE = 1000 * TOKEN_BYTES  # of each


def dense(**more: Any) -> Play:
    return Play(**{"memory": "dense", **NEW_FILES, **more})


def room(free: int, total: int | None = None) -> RoomSeen:
    return RoomSeen(at=0.0, rooms={Tier.HOT: FolderRoom(total=total or free, free=free)})


def budgeted(hot: int) -> Expected:
    return Expected(Budgeted, {"budgets__hot": hot})


def test_a_disk_that_others_fill_costs_the_least_valuable_snapshots():
    play = dense()
    assert play << snapshots_changed(S1, S2) << room(4 * SIZE) >> budgeted(2 * SIZE)
    few = play << room(4 * SIZE - 2) >> drops("s1") >> budgeted(2 * SIZE - 1)
    assert few, "fewer than two have room: that is said"
    assert play << room(0) >> drops("s2") >> budgeted(0)


def test_budgets_of_the_user_stay_whatever_the_disk():
    play = dense(limits=Limits(hot_bytes=2 * SIZE))
    assert play << snapshots_changed(S1, S2) << room(4 * SIZE) >> budgeted(2 * SIZE)
    assert play << room(0)


def test_the_largest_state_of_an_engine_raises_a_small_budget():
    play = dense(n_ctx=1000, token_bytes=TOKEN_BYTES, up=False)
    assert play << room(12 * SIZE) >> budgeted(3 * SIZE)
    assert play << engine_up() << sees() >> budgeted(4 * SIZE)


def test_a_file_that_was_seen_raises_it_if_the_model_has_no_header():
    play = dense()
    assert play << room(12 * SIZE) >> budgeted(3 * SIZE)
    assert play << snapshots_changed(S1) << room(12 * SIZE) >> budgeted(4 * SIZE)
    assert play << snapshots_changed(snapshot("x", B, fingerprint="other", size=2 * SIZE))
    assert play << room(12 * SIZE), "it is of no engine here"


def test_a_small_disk_limits_what_is_written_in_an_hour():
    play = dense(n_ctx=1, token_bytes=TOKEN_BYTES)
    assert play << room(100 * SIZE, total=20 * SIZE) >> budgeted(25 * SIZE)
    assert one_turn(play, "r1", A, slot=0)
    assert play.wakes() >> saves(0) << saved("s1")
    assert one_turn(play, "r2", B, slot=1)
    paused = play.clock
    assert play.wakes() >> saves(1)
    assert play.clock - paused > 1800, "a sixteenth of the disk is 1.25 states an hour"
