"""The circuit breaker: if requests fail on an engine, others go to another engine while one is up."""

from playbooks.playbook import (
    Play,
    arrives,
    drain,
    drained,
    ends,
    engine_lost,
    fails,
    goes,
    knows,
    leaves,
    reports,
    request_fails,
    starts,
)
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.rates import FIRST_REST, LONGEST_REST, TRIPS
from slotkeeper.scheduler.snapshots.budgets import Limits

A, B, C, D = (Tokens(range(n, n + 1000)) for n in (10_000, 20_000, 30_000, 40_000))


def two(**more):
    return Play(engines=2, memory="dense", limits=Limits(pause=1000.0, idle_tokens=0), **more)


def failing(play, engine="e0", times=TRIPS):
    for _ in range(times):
        assert play << request_fails(engine)
    return play


def goes_to(play, request, prompt, engine):
    play << arrives(request) << knows(request, prompt)
    assert play >> goes(request, engine=engine)
    return bool(play << starts(request))


def test_several_failures_in_a_row_open_the_breaker():
    play = failing(two())
    for n, prompt in enumerate((A, B)):
        assert goes_to(play, f"r{n}", prompt, "e1")
    assert play << arrives("r2") << knows("r2", C)  # it waits: e1 is full
    assert play.placement.queued == 1


def test_one_request_without_any_answer_opens_the_breaker():
    play = two()
    assert play << arrives("r1") << knows("r1", A) >> goes("r1", engine="e0")
    assert play << request_fails(broken=True)
    assert play << leaves("r1")
    assert goes_to(play, "again", A, "e1")


def test_an_open_breaker_lets_one_trial_request_through_after_its_delay():
    play = failing(two()).later(FIRST_REST)
    assert goes_to(play, "r1", A, "e0")
    assert goes_to(play, "r2", B, "e1")  # no second trial request
    assert goes_to(play, "r3", C, "e1")
    assert play << ends("r1", 1000) >> reports("r1")
    assert goes_to(play, "r4", D, "e0")
    assert goes_to(play, "r5", A + B, "e0")


def test_a_queued_request_is_the_trial_request_when_the_delay_ends():
    play = failing(two(n_slots=1))
    assert goes_to(play, "r1", A, "e1")
    assert play << arrives("r2") << knows("r2", B)
    while not play.effects:
        play.wakes()
    assert play >> goes("r2", engine="e0")
    assert FIRST_REST <= play.clock - 1000 < FIRST_REST + 1


def test_each_further_failure_doubles_the_delay_of_the_breaker():
    play = failing(two(), times=TRIPS + 2)
    breaker = play.table.breaker
    assert breaker.until - play.clock == FIRST_REST * 4
    failing(play, times=30)
    assert breaker.until - play.clock == LONGEST_REST


def test_an_answer_without_figures_does_not_reset_the_failure_count():
    play = failing(two(), times=TRIPS - 1)
    assert play << arrives("r1") << knows("r1", A) >> goes("r1", engine="e0")
    assert play << fails("r1") >> reports("r1")
    assert play << request_fails()
    assert play.table.failing


def test_an_answer_with_figures_that_ends_with_an_error_does_not_reset_the_failure_count():
    play = failing(two(), times=TRIPS - 1)
    assert play << arrives("r1") << knows("r1", A) >> goes("r1", engine="e0")
    assert play << starts("r1") << ends("r1", 1000, failed=True) >> reports("r1")
    assert play << request_fails()
    assert play.table.failing


def test_a_failing_engine_is_used_if_no_other_engine_is_up():
    play = failing(Play(memory="dense"))
    assert goes_to(play, "r1", A, "e0")
    play = failing(two())
    assert play << engine_lost("e1")
    assert goes_to(play, "r1", A, "e0")


def test_a_failing_engine_is_used_if_the_other_is_drained_or_fails_as_well():
    play = failing(two())
    assert play << drain("e1") >> drained("e1")
    assert goes_to(play, "r1", A, "e0")
    play = failing(failing(two()), "e1")
    assert goes_to(play, "r1", A, "e0")
