"""The cost of files, learned from the times that they took."""

import pytest

from slotkeeper.scheduler.costs import CALL_SECONDS, LinearTimes, Rates

MB = 10**6


def learned(*measured: tuple[float, float]) -> LinearTimes:
    """Return times learned from files of this many megabytes that took this many milliseconds."""
    times = LinearTimes(5e8)
    for size, milliseconds in measured:
        times.took(int(size * MB), milliseconds / 1000)
    return times


def test_before_the_first_measurement_the_time_is_a_guess():
    assert LinearTimes(5e8).seconds(100 * MB) == pytest.approx(CALL_SECONDS + 0.2)


def test_a_slow_first_file_does_not_decide_the_rate():
    assert learned((1, 400)).seconds(MB) < 0.01
    assert learned((1, 400), (1, 5), (1, 5)).seconds(MB) == pytest.approx(CALL_SECONDS + 0.005)


def test_the_learned_rate_may_be_slower_than_the_guess():
    assert learned(*[(1, 50)] * 3).seconds(MB) == pytest.approx(CALL_SECONDS + 0.05)


@pytest.mark.parametrize("held_up", [0, 1, 4])
def test_a_delayed_measurement_changes_no_rate(held_up):
    measured = [(size, 10 + 2 * size) for size in (1, 2, 4, 8, 16, 32)]
    measured[held_up] = (measured[held_up][0], 900)
    times = learned(*measured)
    assert times.seconds(100 * MB) == pytest.approx(CALL_SECONDS + 0.21, rel=0.15)
    assert times.seconds(MB) == pytest.approx(CALL_SECONDS + 0.012, rel=0.35)


def test_a_constant_time_is_not_counted_for_each_byte():
    times = learned(*[(size, 20 + size) for size in (1, 2, 3, 4)])
    assert times.seconds(400 * MB) == pytest.approx(CALL_SECONDS + 0.42, rel=0.01)


def test_times_are_never_negative():
    times = learned((1, 90), (2, 50), (4, 10), (8, 5))
    assert times.seconds(0) >= CALL_SECONDS
    assert times.seconds(1000 * MB) >= times.seconds(MB)


def test_measurements_without_information_are_ignored():
    assert learned((0.001, 500), (1, 0)).seconds(MB) == LinearTimes(5e8).seconds(MB)


def test_costs_of_files_are_the_tokens_that_the_engine_could_compute_meanwhile():
    rates = Rates()
    rates.prefilled(2000, 0.5)
    for _ in range(3):
        rates.saved(2 * MB, 0.01)
        rates.restored(2 * MB, 0.002)
    assert rates.save_price(2 * MB) == pytest.approx(4000 * (CALL_SECONDS + 0.01))
    assert rates.restore_price(2 * MB) == pytest.approx(4000 * (CALL_SECONDS + 0.002))


def test_the_time_from_the_cold_tier_is_learned_and_limited_by_the_time_to_compute():
    rates = Rates()
    before = rates.restore_price(100 * MB, cold=True)
    for _ in range(3):
        rates.brought(100 * MB, 5.0)
    rates.brought(100 * MB, 0.0)  # the file was already in the hot tier
    assert rates.restore_price(100 * MB, cold=True) > 5 * before
    assert rates.restore_price(100 * MB) < before
    assert rates.bring_within(20_000) == 20.0
    assert rates.bring_within(10) == 1.0
