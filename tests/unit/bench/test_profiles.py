"""Workloads on simulated engines of real proportions, beside the stock engine."""

import pytest
from benchmarks.engine_profiles import PROFILES
from benchmarks.profile_work import WORK
from benchmarks.profiles import SEEDS as PUBLISHED
from benchmarks.profiles import SLOT_TOKENS, SLOTS, compared

# Two runs: a save may meet a request. The five runs of docs/benchmarks.md have the limit of 1.02.
SEEDS = (1, 2)
MOST = 1.05
# To copy a state takes as long there as to compute it; docs/benchmarks.md says which works wait longer.
SLOW_COPIES = "h200-8b"
WAIT_LONGER = {"document"}
# Two full slots with 16 bits exceed the cards by 4 and 5 GiB. With a q8_0 KV cache they would fit, but no
# public report has its speed.
TOO_LARGE = {"card-32b", "cards-70b"}


@pytest.mark.parametrize(
    "profile", [p for p in PROFILES if p.name != SLOW_COPIES], ids=lambda profile: profile.name
)
def test_clients_wait_no_longer_than_with_the_stock_engine(profile):
    rows = [compared(profile, work, SEEDS) for work in WORK]
    assert {row["work"]: row["ratio"] for row in rows if row["ratio"] > MOST} == {}
    assert sum(row["ours"] for row in rows) < 0.9 * sum(row["stock"] for row in rows)


def test_where_copies_are_slow_only_known_works_wait_longer():
    (profile,) = (p for p in PROFILES if p.name == SLOW_COPIES)
    ratios = {work: compared(profile, work, SEEDS)["ratio"] for work in WORK}
    assert {work for work, ratio in ratios.items() if ratio > MOST} <= WAIT_LONGER


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_weights_slots_checkpoints_and_ram_cache_fit_into_the_memory_of_the_machine(profile):
    assert min(profile.weights_bytes, profile.machine_bytes) > 0
    assert profile.traits(SLOTS).ram_bytes == profile.ram_cache_mib << 20, "what is simulated is what fits"
    assert (profile.spare_bytes(SLOTS, SLOT_TOKENS) < 0) == (profile.name in TOO_LARGE)
    assert profile.spare_bytes(SLOTS, SLOT_TOKENS // 2) >= 0


@pytest.mark.parametrize("work", WORK)
def test_each_prompt_and_its_answer_fit_into_a_slot(work):
    phases = (phase for seed in PUBLISHED for phase in WORK[work](seed))
    turns = (turn for phase in phases for steps in phase.values() for step in steps for turn in step)
    assert max(len(turn.prompt) + len(turn.reply) for turn in turns) <= SLOT_TOKENS
