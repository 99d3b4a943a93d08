"""The cost of files, learned from the times that they took."""

from math import inf

import pytest

from slotkeeper.scheduler.rates import (
    CALL_SECONDS,
    COPY_BYTES_PER_SECOND,
    REMEMBERED,
    LinearTimes,
    Rates,
)

MB = 10**6


def learned(*measured: tuple[float, float]) -> LinearTimes:
    """Return times learned from files of this many megabytes that took this many milliseconds."""
    times = LinearTimes(5e8)
    for size, milliseconds in measured:
        times.took(int(size * MB), milliseconds / 1000)
    return times


def test_the_guess_for_a_prefill_falls_with_the_size_of_the_model_until_one_was_measured():
    rates = Rates()
    rates.take_header(1024)
    assert (rates.prefill.mean, rates.prefilling.seconds(1000)) == pytest.approx((1000.0, 1.0))
    rates.take_header(320_000)
    assert (rates.prefill.mean, rates.prefilling.seconds(1000)) == pytest.approx((500.0, 2.0))
    rates.prefilled(1000, 0.5)
    rates.take_header(640_000)
    assert rates.prefill.mean == 2000.0


def test_a_slow_first_file_does_not_decide_the_rate():
    assert learned((1, 400)).seconds(MB) < 0.1
    assert learned((1, 400), (1, 5), (1, 5)).seconds(MB) == pytest.approx(CALL_SECONDS + 0.005)


def test_a_slow_first_file_counts_as_much_as_the_guess_and_a_quick_one_alone():
    guessed = LinearTimes(5e8).seconds(10 * MB)
    assert learned((10, 180)).seconds(10 * MB) == pytest.approx(3 * guessed, rel=0.2)
    assert learned((10, 2)).seconds(10 * MB) == pytest.approx(CALL_SECONDS + 0.002)


def test_a_large_slow_first_file_counts_alone():
    assert learned((100, 1800)).seconds(100 * MB) == pytest.approx(CALL_SECONDS + 1.8)


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


def test_a_file_is_priced_in_the_tokens_by_which_a_prefill_may_be_longer():
    """Short prefills take a pass each, so they say little about the time of a token more."""
    rates = Rates()
    rates.prefilled(600, 2.5)
    assert rates.marginal_prefill == rates.prefill.mean == pytest.approx(240)
    for tokens in (64, 70, 80, 100):
        rates.prefilled(tokens, 0.5 + tokens / 300)
    assert rates.prefill.mean < 150
    assert rates.marginal_prefill == pytest.approx(240), "no more than that of the fastest prefill"
    rates.saved(200 * MB, 1.0)
    assert rates.save_price(200 * MB) == pytest.approx(240, rel=0.02)


def test_an_engine_that_has_become_slower_is_priced_by_its_last_prefills():
    rates = Rates()
    rates.prefilled(600, 2.5)
    for tokens in (400, 500, 600) * REMEMBERED:
        rates.prefilled(tokens, 0.5 + tokens / 100)
    assert rates.marginal_prefill == pytest.approx(600 / 6.5)


def test_a_copy_is_as_slow_as_on_a_card_until_one_was_measured():
    rates = Rates()
    rates.prefilled(600, 10.0)
    assert rates.copy_price(100 * MB) == pytest.approx(60 * 100 * MB / COPY_BYTES_PER_SECOND)
    assert rates.copy_price(0) == 0.0
    rates.copied(100 * MB, 0.01)
    assert rates.copy_price(100 * MB) == pytest.approx(0.01 * 60)


@pytest.mark.parametrize(
    ("seconds", "held_up", "found"),
    [
        (1.0, 0.0, 1.0),  # nothing else was at work
        (1.0, 0.6, 0.4),  # it took at least that
        (1.0, 0.95, 0.1),  # our estimate stands
        (0.05, 5.0, 0.05),  # it took at most that
        (1.0, inf, 0.1),
    ],
)
def test_a_copy_beside_other_work_tells_between_which_bounds_its_time_was(seconds, held_up, found):
    rates = Rates()
    for _ in range(3):
        rates.copied(100 * MB, 0.1)
    for _ in range(7):
        rates.copied(100 * MB, seconds, held_up=held_up)
    assert rates.copying.seconds(100 * MB) == pytest.approx(found)


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
