"""The simulator's engine: the time that its work takes, and what that does to running answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.simulator.timed_engine import EngineRates, Task, TimedEngine, traits_of
from benchmarks.simulator.virtual_clock import VirtualClock

from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import Memory
from slotkeeper.scheduler.types import SlotId

RATES = EngineRates(prefill=1000.0, decode=50.0, deeper=1e-7, save=1e9, restore=2e9, checkpoint_bytes=0)
FIRST, SECOND = SlotId(0), SlotId(1)


class Bench:
    """An engine whose clock runs until it is quiet."""

    def __init__(
        self, rates: EngineRates = RATES, memory: Memory = Memory.DENSE, *, ram: bool = False
    ) -> None:
        self.clock = VirtualClock()
        traits = traits_of(memory, 2, rates, files=True, ram_cache=ram)
        self.engine = TimedEngine(traits, rates, self.clock)
        self.sent = 0

    def run(self, prompt: Tokens, reply: int, slot: SlotId | None = FIRST, at: float = 0.0) -> list[Task]:
        """Run a task at its time; the list gets it then."""
        found: list[Task] = []
        self.sent += 1
        answer = Tokens(range(7_000_000, 7_000_000 + reply))
        self.clock.at(at, lambda: found.append(self.engine.run(prompt, answer, slot, ended=lambda: None)))
        return found

    def until_quiet(self) -> float:
        self.clock.run_until(lambda: self.engine.quiet and self.engine.tasks == self.sent)
        return self.clock.now


def prompt_of(tokens: int, first: int = 1000) -> Tokens:
    return Tokens(range(first, first + tokens))


def test_the_rates_are_those_of_a_ubatch_and_of_one_answer():
    assert RATES.pass_seconds + 512 * RATES.token_seconds == pytest.approx(512 / 1000)
    assert RATES.pass_seconds + RATES.token_seconds == pytest.approx(1 / 50)


@pytest.mark.parametrize("tokens", [10, 512, 1024, 5000])
def test_a_prompt_takes_a_pass_for_each_ubatch_and_more_for_deeper_tokens(tokens):
    bench = Bench()
    (task,) = (bench.run(prompt_of(tokens), 0), bench.until_quiet())[0]
    passes = -(-tokens // 512)  # batches of 2,048 are whole ubatches
    flat = passes * RATES.pass_seconds + tokens * RATES.token_seconds
    assert task.first == pytest.approx(flat + tokens**2 / 2 * RATES.deeper)


def test_the_next_turn_computes_only_its_new_part():
    bench = Bench()
    bench.run(prompt_of(1000), 0)
    bench.until_quiet()
    found = bench.run(prompt_of(1200), 0)
    bench.until_quiet()
    (task,) = found
    assert task.cached == 1000
    assert task.seconds == pytest.approx(
        RATES.pass_seconds + 200 * RATES.token_seconds + 200 * 1100 * RATES.deeper
    )


def test_an_answer_stands_still_while_another_prompt_is_computed():
    bench = Bench(replace(RATES, deeper=0.0))
    answer = bench.run(prompt_of(100), 200)
    bench.run(prompt_of(2000, 50_000), 0, SECOND, at=1.0)
    bench.until_quiet()
    passes = 4 * RATES.pass_seconds + 2001 * RATES.token_seconds
    assert answer[0].stall == pytest.approx(passes)


def test_an_answer_alone_has_no_gap_but_its_own_pace():
    bench = Bench(replace(RATES, deeper=0.0))
    answer = bench.run(prompt_of(100), 50)
    bench.until_quiet()
    assert answer[0].stall == pytest.approx(1 / 50)
    assert answer[0].last - answer[0].first == pytest.approx(49 / 50)


def test_a_save_waits_for_the_batch_and_then_stops_the_engine():
    bench = Bench(replace(RATES, deeper=0.0))
    bench.run(prompt_of(1000), 0, SECOND)
    bench.until_quiet()
    answer, sizes = bench.run(prompt_of(100, 50_000), 100), list[int]()
    bench.clock.at(bench.clock.now + 1.0, lambda: bench.engine.save(SECOND, sizes.append))
    bench.until_quiet()
    assert sizes == [1000 * RATES.token_bytes]
    assert answer[0].stall == pytest.approx(1 / 50 + 0.003 + sizes[0] / 1e9)


def test_a_stopped_prefill_ends_with_its_batch_and_keeps_it():
    bench = Bench()
    found = bench.run(prompt_of(8000), 0)
    bench.clock.at(0.5, lambda: setattr(found[0], "stopped", True))
    bench.until_quiet()
    contents = bench.engine.shadow.slots[FIRST]
    assert contents is not None
    assert contents.tokens == prompt_of(2048)


def test_an_unpinned_task_waits_for_a_free_slot():
    bench = Bench()
    tasks = [bench.run(prompt_of(100, first), 20, None) for first in (1000, 2000, 3000)]
    bench.until_quiet()
    (a,), (b,), (c,) = tasks
    assert {a.slot, b.slot} == {FIRST, SECOND}
    assert c.first > min(a.last, b.last)


def test_a_copy_to_the_ram_cache_and_back_takes_its_bytes_time():
    rates = replace(RATES, deeper=0.0, copy=1e8)
    bench = Bench(rates, ram=True)
    bench.run(prompt_of(1000), 0)
    bench.until_quiet()
    found = bench.run(prompt_of(100, 50_000), 0)
    begun = bench.clock.now
    bench.until_quiet()
    copied = 1000 * rates.token_bytes / 1e8
    assert found[0].taken - begun == pytest.approx(copied)
    assert found[0].first - begun == pytest.approx(copied + rates.pass_seconds + 100 * rates.token_seconds)
    begun, back = bench.clock.now, bench.run(prompt_of(1001), 0)
    bench.until_quiet()
    assert back[0].cached == 1000
    assert back[0].first - begun > copied


def test_a_hybrid_model_makes_checkpoints_which_cost_their_bytes():
    cheap, dear = (replace(RATES, checkpoint_bytes=size) for size in (0, 120_000_000))
    firsts = []
    for rates in (cheap, dear):
        bench = Bench(rates, Memory.HYBRID)
        found = bench.run(prompt_of(3000), 0)
        bench.until_quiet()
        firsts.append(found[0].first)
        contents = bench.engine.shadow.slots[FIRST]
        assert contents is not None
        made = len(contents.checkpoints)
    assert made == 2
    assert firsts[1] - firsts[0] == pytest.approx(made * 120_000_000 / RATES.copy)


def test_checkpoints_are_copied_to_the_ram_cache_with_their_state_and_moved_back():
    rates = replace(RATES, checkpoint_bytes=120_000_000)
    bench = Bench(rates, Memory.HYBRID, ram=True)
    long, other = rates.state_bytes(3000, 2), rates.state_bytes(100, 1)
    copies = (0, long, other + rates.state_bytes(3000))  # before each task
    prompts = (prompt_of(3000), prompt_of(100, 50_000), prompt_of(3100))
    for prompt, size in zip(prompts, copies, strict=True):
        begun, found = bench.clock.now, bench.run(prompt, 0)
        bench.until_quiet()
        assert found[0].taken - begun == pytest.approx(size / rates.copy)


def test_a_killed_engine_has_lost_all_states():
    bench = Bench()
    bench.run(prompt_of(100), 0)
    bench.until_quiet()
    bench.engine.kill()
    assert bench.engine.shadow.slots == [None, None]
    assert not any(view.busy or view.held for view in bench.engine.views())
