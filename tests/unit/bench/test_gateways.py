"""The routing rules of gateways that the simulator compares."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.simulator.simulation import cache_aware, consistent_hash, lmetric, round_robin

from slotkeeper.scheduler.prompts.tokens import EMPTY, Tokens


@dataclass
class Sidecar:
    in_flight: int = 0
    pending: int = 0
    slots: list[Tokens] = field(default_factory=list)

    def held(self, prompt: Tokens) -> int:
        return max((tokens.lcp(prompt) for tokens in self.slots), default=0)


def workers(count: int) -> list[Sidecar]:
    return [Sidecar() for _ in range(count)]


def test_round_robin_uses_the_engines_in_turn():
    choose = round_robin(workers(3))
    assert [choose("c", EMPTY) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_a_conversation_keeps_its_engine_and_few_move_when_an_engine_is_added():
    names = [f"c{n}" for n in range(600)]
    three, four = consistent_hash(workers(3)), consistent_hash(workers(4))
    before = [three(name, EMPTY) for name in names]
    assert before == [three(name, EMPTY) for name in names]
    assert all(120 < before.count(n) < 280 for n in range(3))
    after = [four(name, EMPTY) for name in names]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {3}
    assert 60 < len(moved) < 250


def test_cache_aware_follows_the_prefix():
    fleet = workers(2)
    choose = cache_aware(fleet)
    one, other = Tokens([1] * 3000), Tokens([2] * 3000)
    first = choose("a", one)
    fleet[first].in_flight = 1
    assert choose("b", other) == 1 - first  # unknown prompt: the engine with the fewest requests
    assert choose("c", one + Tokens([3] * 500)) == first


def test_cache_aware_leaves_an_engine_with_too_many_requests():
    fleet = workers(4)
    choose = cache_aware(fleet)
    prompt = Tokens([1] * 3000)
    first = choose("a", prompt)
    fleet[first].in_flight = 5
    assert choose("a", prompt) == first  # not above the margin of four
    fleet[first].in_flight = 20
    assert choose("a", prompt) != first


def test_lmetric_weighs_new_tokens_by_the_batch():
    fleet = workers(2)
    prompt = Tokens(range(1000))
    fleet[0].slots, fleet[0].in_flight = [prompt.cut(0, 900)], 3  # 100 new, a batch of 4
    assert lmetric(fleet)("a", prompt) == 0
    fleet[0].in_flight = 10  # 1100 against 1000
    assert lmetric(fleet)("a", prompt) == 1
    fleet[1].pending = 5000
    assert lmetric(fleet)("a", prompt) == 0
