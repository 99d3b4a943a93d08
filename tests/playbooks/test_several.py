"""Engines of different speed and load: where requests go, and when one waits for a busy slot."""

import pytest

from playbooks.playbook import (
    NEW_FILES,
    Play,
    arrives,
    drain,
    drained,
    ends,
    engine_lost,
    engine_up,
    filed,
    goes,
    knows,
    leaves,
    plants,
    reports,
    restores,
    saves,
    sees,
    snapshot,
    starts,
    written,
)
from slotkeeper.scheduler.effects import Purpose, SaveMoment
from slotkeeper.scheduler.prompts.tokens import Boundary, BoundaryKind, Tokens
from slotkeeper.scheduler.rates import MEASURED
from slotkeeper.scheduler.snapshots.budgets import Limits
from slotkeeper.scheduler.types import EngineId, Reason

QUIET = Limits(pause=1000.0, idle_tokens=0)
MORE = Tokens(range(100))


def prompt(name: int, tokens: int = 1000) -> Tokens:
    """Return a prompt that shares nothing with the others."""
    return Tokens(range(name * 100_000, name * 100_000 + tokens))


def play_of(*speeds: tuple[float, float], slots: int = 2, **more) -> Play:
    """Make an engine for each pair of prefill and decode rates (tokens/s); replies have 100 tokens."""
    traits = {"memory": "dense", "n_slots": slots, "limits": QUIET, **more}
    play = Play(engines=len(speeds), **traits)
    for name, (prefill, decode) in zip(play.names, speeds, strict=True):
        rates = play.placement.tables[name].rates
        for _ in range(MEASURED):
            rates.prefilled(int(prefill * 100), 100.0)
            rates.replied(100, 100 / decode)
    return play


def begins(play: Play, request: str, tokens: Tokens, engine: str, **how) -> bool:
    play << arrives(request) << knows(request, tokens)
    assert play >> goes(request, engine=engine, **how)
    return bool(play << starts(request))


def test_the_decode_rate_of_an_engine_counts_as_well_as_its_prefill_rate():
    """1000 prompt tokens are half a second faster; 100 tokens of answer are eight seconds slower."""
    assert begins(play_of((2000, 10), (1000, 50)), "r1", prompt(1), "e1")


def only(play: Play, request: str, tokens: Tokens, engine: str, other: str, **how) -> bool:
    """Send a request to an engine that it would not choose: the other one is drained meanwhile."""
    assert play << drain(other) >> drained(other)
    assert begins(play, request, tokens, engine, **how)
    return bool(play << drain(other, on=False))


def test_a_conversation_stays_on_a_slower_engine_if_that_is_faster_in_total():
    """Its 100 tokens take a second there, and the answer two more; elsewhere 4100 tokens take four."""
    play = play_of((100, 25), (1000, 50))
    assert only(play, "r1", prompt(1, 4000), "e0", "e1")
    assert play << ends("r1", 4000) >> reports("r1")
    assert begins(play, "r2", prompt(1, 4000) + MORE, "e0", slot=0)


def test_a_conversation_moves_if_waiting_costs_more_than_computing_it_again():
    """A prompt of 30,000 tokens is before it; elsewhere 4100 tokens are computed again."""
    play = play_of((1000, 50), (1000, 50))
    assert begins(play, "r1", prompt(1, 4000), "e0")
    assert play << ends("r1", 4000) >> reports("r1")
    assert only(play, "r2", prompt(2, 30_000), "e0", "e1", slot=1)
    assert begins(play, "r3", prompt(1, 4000) + MORE, "e1", reason=Reason.COLD)


def test_engines_whose_rates_differ_by_noise_count_as_equally_fast():
    """An empty slot on one engine is used before a conversation loses its slot on the other."""
    play = play_of((1000, 50), (1000, 50))
    e0, e1 = (play.placement.tables[name].rates for name in play.names)
    for speed in (900, 1100, 700, 1000):
        e0.prefilled(speed * 10, 10.0)
        e1.prefilled((speed + 100) * 10, 10.0)
    for n, engine in ((1, "e0"), (2, "e1"), (3, "e0"), (4, "e1")):
        assert begins(play, f"r{n}", prompt(n), engine)
        assert n % 2 or all(play << ends(f"r{m}", 1000) >> reports(f"r{m}") for m in (n - 1, n))


def test_between_equal_engines_new_tokens_times_batch_size_decides():
    """An engine with three answers holds a thousand tokens; computing the rest would delay all three."""
    play = play_of((1000, 50), (1000, 50), slots=4)
    for n in range(8):
        assert begins(play, f"r{n}", prompt(n + 1), f"e{n % 2}")
    for n in (0, 1, 3, 5, 7):
        assert play << ends(f"r{n}", 1000) >> reports(f"r{n}")
    play.later(10)
    # 300 x 4 there; 1300 x 1 elsewhere, and the lost contents of a slot
    assert begins(play, "near", prompt(1) + prompt(50, 300), "e0", slot=0)
    assert play << ends("near", 1300, 1000) >> reports("near")
    # 9000 x 4 there; 10,000 x 1 elsewhere
    assert begins(play, "far", prompt(1) + prompt(60, 9000), "e1")


def test_a_request_waits_for_a_fast_engine_whose_slot_is_soon_free():
    play = play_of((10, 50), (1000, 50), slots=1)
    assert begins(play, "r1", prompt(1), "e1")
    assert play << arrives("r2") << knows("r2", prompt(2))
    assert play.placement.queued == 1  # three seconds and one, not a hundred
    assert play << ends("r1", 1000) >> reports("r1") >> goes("r2", engine="e1")


def test_queued_requests_count_in_the_price_of_an_engine():
    """The third one would wait for two others, so the slow engine is faster for it."""
    play = play_of((100, 50), (1000, 50), slots=1)
    assert begins(play, "r1", prompt(1, 3000), "e1")
    assert play << arrives("r2", client="b") << knows("r2", prompt(2))
    assert play.placement.queued == 1
    assert begins(play, "r3", prompt(3), "e0")


@pytest.mark.parametrize("over", [leaves("r1"), engine_lost("e1")])
def test_a_waiting_request_is_placed_again_if_the_request_or_engine_it_waits_for_is_gone(over):
    play = play_of((10, 50), (1000, 50), slots=1)
    assert begins(play, "r1", prompt(1), "e1")
    assert play << arrives("r2") << knows("r2", prompt(2))
    play << over
    if isinstance(over, type(engine_lost())):
        assert play >> goes("r2", engine="e0")
    assert not play.placement.tables[EngineId("e1")].work.served


def test_an_engine_without_measured_rates_gets_the_rates_of_the_others():
    play = play_of((5000, 20), (5000, 20))
    play.names.append(EngineId("e2"))
    assert play << engine_up("e2") << sees(engine="e2")
    new = play.placement.tables[EngineId("e2")].rates
    assert (new.prefill.mean, new.decode.mean, new.reply.mean, new.prefill.shown) == (5000, 20, 100, None)


def test_rates_are_learned_from_answers():
    play = play_of((1000, 50))
    assert begins(play, "r1", prompt(1), "e0")
    play.later(9.97)
    assert play << ends("r1", 1000, prefill_seconds=5.0, generated=500) >> reports("r1")
    rates = play.table.rates
    assert rates.prefill.mean == pytest.approx(1000 - 0.3 * 800)
    assert rates.decode.mean == pytest.approx(50 + 0.3 * (500 / 5 - 50), rel=0.01)
    assert rates.reply.mean == pytest.approx(100 + 0.3 * 400)


def test_a_request_never_waits_if_its_only_engine_has_a_free_slot():
    play = play_of((10, 1))
    assert begins(play, "r1", prompt(1, 30_000), "e0")
    assert begins(play, "r2", prompt(2, 30_000), "e0")


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "not kept"])
def test_a_request_that_waits_for_the_file_of_an_engine_that_is_lost_gets_its_place_with_the_file(kept):
    play = Play(engines=2, n_slots=1, **NEW_FILES)
    long = prompt(1, 5000)
    assert play << arrives("r1") << knows("r1", long) >> goes("r1", engine="e0")
    assert play << ends("r1", 5000) >> reports("r1")
    assert play.wakes() >> saves(0, SaveMoment.PAUSE)
    chore = play.step.request
    assert play << written()
    assert play << arrives("r2", id_slot=0) >> goes("r2", engine="e0")
    assert play << starts("r2") << arrives("r3") << knows("r3", long + MORE)
    assert play << engine_lost("e0")
    play << filed(chore, snapshot("s1", long, checkpoints=(4484, 4996)) if kept else None)
    assert play >> (restores(0, "s1") if kept else goes("r3", engine="e1"))


def test_a_request_that_waits_for_the_file_of_another_gets_its_place_if_that_one_leaves():
    play = Play(engines=2, n_slots=1, **NEW_FILES)
    system, head = prompt(1, 5000), Boundary(5000, BoundaryKind.HEAD)
    play << arrives("r1") << knows("r1", system + prompt(2), head)
    assert play >> plants("r1", 0, Purpose.PLANT, tokens=system, place__engine="e0")
    assert play << arrives("r2") << knows("r2", system + prompt(3), head)
    assert play << engine_lost("e0")
    assert play << leaves("r1") >> plants("r2", 0, Purpose.PLANT, place__engine="e1")
