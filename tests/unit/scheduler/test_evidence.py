"""Traits inferred from an engine's batches, answers and files."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import (
    FLAGS,
    TAIL,
    Checkpoint,
    EngineTraits,
    Known,
    Memory,
    SlotContents,
    after_prefill,
    reuse,
)
from slotkeeper.scheduler.slots.evidence import Doubts, by_batches
from slotkeeper.scheduler.slots.shadow import EngineShadow
from slotkeeper.scheduler.types import SlotId

STOCK = EngineTraits(n_slots=1, n_ctx=100_000, memory=Memory.HYBRID, ram_cache=False)
NEWER = replace(STOCK, eager_thinning=False)
TOLD = STOCK.learned(Known.FLAGS, **{name: getattr(STOCK, name) for name in FLAGS})
SLOT = SlotId(0)


def cuts(cached: int, end: int, *, batch: int, ubatch: int) -> tuple[int, ...]:
    """Return where an engine ends its batches (engine.md 3)."""
    stops, at = [], cached
    while at < end:
        at = min([end, at + batch, *(c for c in (end - TAIL - ubatch, end - TAIL) if c > at)])
        stops.append(at)
    return tuple(stops[:-1])


@given(
    cached=st.integers(0, 5000),
    computed=st.integers(1, 20_000),
    ubatch=st.sampled_from([64, 128, 256, 512, 1024, 2048]),
    batch=st.sampled_from([512, 1024, 2048, 4096]),
)
def test_batch_sizes_inferred_from_progress_are_never_wrong_and_exact_for_long_prefills(
    cached, computed, ubatch, batch
):
    ubatch, end = min(ubatch, batch), cached + computed
    found = by_batches(STOCK, cached=cached, end=end, cuts=cuts(cached, end, batch=batch, ubatch=ubatch))
    assert found.checkpoint_cap == STOCK.checkpoint_cap
    if computed > ubatch + TAIL:
        assert found.n_ubatch == ubatch
    elif computed > STOCK.n_ubatch + TAIL:
        assert STOCK.n_ubatch < found.n_ubatch <= ubatch
    else:
        assert found.n_ubatch == STOCK.n_ubatch
    if computed > 2 * batch + ubatch + TAIL:
        assert found.n_batch == batch


def test_an_engine_that_ends_no_batch_early_makes_no_checkpoints():
    assert by_batches(STOCK, cached=0, end=900, cuts=()).checkpoint_cap == 0
    assert by_batches(STOCK, cached=0, end=900, cuts=(512,)).checkpoint_cap == 0


@pytest.mark.parametrize(
    ("traits", "seen"),
    [
        (STOCK, None),  # it shows no progress
        (TOLD, ()),
        (replace(STOCK, memory=Memory.DENSE), ()),
        (replace(STOCK, memory=Memory.UNKNOWN), ()),  # may be dense
        (STOCK, (896, 603)),  # two slots shared a batch: no --ubatch-size
    ],
)
def test_progress_with_another_explanation_proves_nothing(traits, seen):
    found = by_batches(traits, cached=0, end=900, cuts=seen)
    assert (found.checkpoint_cap, found.n_ubatch) == (32, 512)


# -- by answers: a shadow beside an engine that has other flags ---------------------------------------


class Engine:
    """A model of a real engine: its own list of checkpoints, by its own flags."""

    def __init__(self, traits: EngineTraits) -> None:
        self.traits = traits
        self.held: SlotContents | None = None
        self.tasks = 0

    def ask(self, prompt: Tokens) -> int:
        cached = reuse(self.held, prompt, self.traits)
        self.tasks += 1
        made = after_prefill(
            self.held.checkpoints if self.held else (),
            reuse=cached,
            end=len(prompt),
            user_starts=(),
            task=self.tasks,
            traits=self.traits,
        )
        self.held = SlotContents(tokens=prompt, checkpoints=made)
        return cached


def ask(engine: Engine, shadow: EngineShadow, doubts: Doubts, prompt: Tokens) -> tuple[int, int]:
    """Give the same prompt to both; return the prediction and the reuse."""
    reuse_plan, base = shadow.plan_reuse(SLOT, prompt), shadow.slots[SLOT]
    cached = engine.ask(prompt)
    shadow.launch(reuse_plan, ())
    shadow.finish(
        SLOT,
        prompt=prompt,
        prompt_tokens=len(prompt),
        cached=cached,
        generated=0,
        user_starts=(),
        hash_chain=(),
        request=None,
        now=0.0,
    )
    if base:
        shadow.learn(doubts.by_reuse(shadow.traits, base, predicted=reuse_plan.reuse, cached=cached))
    return reuse_plan.reuse, cached


def prompts(turns: int, *, back_to: int) -> list[Tokens]:
    """Return a conversation, and then one that diverges from its turn `back_to`."""
    asked = [Tokens(range(1, 700 * turn)) for turn in range(1, turns + 1)]
    return [*asked, Tokens([*range(1, 700 * back_to + 10), *range(90_000, 90_300)])]


def played(real: EngineTraits, believed: EngineTraits, *scripts: list[Tokens]) -> EngineShadow:
    engine, shadow, doubts = Engine(real), EngineShadow(believed), Doubts()
    for script in scripts:
        for prompt in script:
            ask(engine, shadow, doubts, prompt)
    return shadow


def test_a_checkpoint_that_should_be_gone_shows_that_none_are_thinned_out():
    real = replace(STOCK, checkpoint_min_step=0)
    shadow = played(real, STOCK, prompts(5, back_to=3))
    assert shadow.traits.checkpoint_min_step == 0
    assert shadow.traits.known("checkpoint_min_step") is Known.KEPT
    engine, doubts = Engine(real), Doubts()
    shadow = EngineShadow(STOCK)
    seen = [ask(engine, shadow, doubts, p) for p in [*prompts(5, back_to=3), *prompts(5, back_to=2)]]
    assert seen[5][0] < seen[5][1], "the first time it is a surprise"
    assert all(predicted == cached for predicted, cached in seen[6:]), "and never again"


def test_an_engine_that_keeps_more_checkpoints_than_stock_is_recognised():
    believed = replace(STOCK, checkpoint_min_step=0)
    shadow = played(replace(believed, checkpoint_cap=64), believed, prompts(25, back_to=2))
    assert shadow.traits.checkpoint_cap == 64


def test_an_engine_that_keeps_fewer_checkpoints_is_recognised_at_the_second_observation():
    believed = replace(STOCK, checkpoint_min_step=0)
    real = replace(believed, checkpoint_cap=8)
    once = played(real, believed, prompts(8, back_to=2))
    assert once.traits.checkpoint_cap == 32, "the slot may have been somebody else's meanwhile"
    twice = played(real, believed, prompts(8, back_to=2), prompts(8, back_to=2))
    assert twice.traits.checkpoint_cap < 32
    assert twice.traits.known("checkpoint_cap") is Known.MISSED


@pytest.mark.parametrize("traits", [STOCK, NEWER, replace(STOCK, checkpoint_min_step=0)])
def test_an_engine_that_behaves_as_expected_changes_no_traits(traits):
    shadow = played(traits, traits, prompts(8, back_to=3), prompts(20, back_to=1))
    assert not shadow.traits.knowledge


def test_flags_read_from_the_command_line_are_not_doubted():
    shadow = played(replace(STOCK, checkpoint_min_step=0), TOLD, prompts(5, back_to=3))
    assert shadow.traits == TOLD
    assert all(not contents.possible for contents in shadow.slots if contents)


# -- by files -----------------------------------------------------------------------------------------

HELD = SlotContents(
    tokens=Tokens(range(1, 5000)), checkpoints=tuple(Checkpoint(100 * n, 1) for n in range(1, 33))
)


def test_a_file_with_more_checkpoints_than_expected_raises_the_checkpoint_limit():
    found = Doubts().by_file(NEWER, HELD, [100 * n for n in range(1, 50)])
    assert (found.checkpoint_cap, found.known("checkpoint_cap")) == (64, Known.KEPT)


def test_a_file_with_only_the_last_checkpoints_lowers_the_limit_at_the_second_observation():
    doubts, last = Doubts(), [100 * n for n in range(25, 33)]
    assert doubts.by_file(NEWER, HELD, last) is NEWER
    assert doubts.by_file(NEWER, HELD, last).checkpoint_cap == 8


def test_a_file_with_unexpected_checkpoints_proves_nothing():
    doubts = Doubts()
    for _ in range(3):
        assert doubts.by_file(NEWER, HELD, [150, 250]) is NEWER
        assert doubts.by_file(TOLD, HELD, [100 * n for n in range(1, 50)]) is TOLD


def test_an_engine_that_keeps_no_checkpoints_is_recognised_at_the_second_observation():
    doubts, traits = Doubts(), STOCK
    state = SlotContents(tokens=Tokens(range(900)), checkpoints=(Checkpoint(896, 1),))
    for cap in (STOCK.checkpoint_cap, 0):
        traits = doubts.by_reuse(traits, state, predicted=896, cached=0)
        assert traits.checkpoint_cap == cap


def test_a_missing_checkpoint_does_not_mean_that_there_are_none_if_one_was_used_before():
    doubts, traits = Doubts(used=1), STOCK
    state = SlotContents(tokens=Tokens(range(900)), checkpoints=(Checkpoint(896, 1),))
    for _ in range(3):
        traits = doubts.by_reuse(traits, state, predicted=896, cached=0)
    assert traits.checkpoint_cap == STOCK.checkpoint_cap
