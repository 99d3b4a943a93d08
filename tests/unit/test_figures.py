"""Figures at a terminal: short, readable, and right at the limits of their ranges."""

from __future__ import annotations

import pytest

from slotkeeper.cli.terminal import (
    age,
    bar,
    lane,
    one_line,
    percent,
    ratio,
    seconds,
    size,
    span,
    sparkline,
    tokens,
)

NOW = 1_000_000_000.0  # 2001-09-09T01:46:40Z


@pytest.mark.parametrize(
    ("moment", "text"),
    [
        ("2001-09-09T01:46:40Z", "0 s"),
        ("2001-09-09T01:46:41Z", "0 s"),  # another machine's clock
        ("2001-09-09T01:45:41Z", "59 s"),
        ("2001-09-09T01:45:40Z", "1 min"),
        ("2001-09-08T23:46:40Z", "2 h"),
        ("2001-09-01T00:00:00Z", "8 days"),
    ],
)
def test_ages_are_shown_in_the_largest_fitting_unit(moment, text):
    assert age(moment, NOW) == text


def test_sizes_are_shown_with_binary_units():
    assert [size(0), size(2048), size(3 << 29)] == ["0 B", "2.0 KiB", "1.5 GiB"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0.0 ms"), (0.0032, "3.2 ms"), (0.34, "340 ms"), (12.34, "12.3 s"), (250, "4 min")],
)
def test_longer_durations_have_coarser_units(value, text):
    assert seconds(value) == text


def test_unknown_figures_are_shown_as_a_dash():
    assert [tokens(None), span(None), seconds(None), ratio(None), percent(1, 0)] == ["-"] * 5


def test_only_the_whole_is_shown_as_100_percent():
    assert [percent(part, 1000) for part in (0, 999, 1000)] == ["0 %", "99 %", "100 %"]


@pytest.mark.parametrize(
    ("part", "drawn"),
    [(0, "····"), (1, "▏···"), (500, "██··"), (1000, "████"), (2000, "████"), (-5, "····"), (562, "██▎·")],
)
def test_a_bar_shows_every_part_above_zero(part, drawn):
    assert bar(part, 1000, 4) == drawn
    assert bar(part, 0, 4) == "····", "of an empty total"


@pytest.mark.parametrize(
    ("begin", "end", "whole", "drawn"),
    [
        (0, 1, 1, "████"),
        (0, 0, 1, "█"),
        (1, 1, 1, "   █"),
        (0.5, 0.75, 1, "  █"),
        (0.26, 0.3, 1, " █"),
        (0, 0, 0, "█"),
    ],
)
def test_a_lane_begins_at_its_time_and_is_always_visible(begin, end, whole, drawn):
    assert lane(begin, end, whole, 4) == drawn


def test_a_sparkline_shows_a_dot_where_there_were_no_requests():
    assert sparkline([None, 0, 0.5, 1, 1.5]) == "·▁▅██"


def test_a_text_is_shown_on_one_line_with_control_characters_escaped():
    assert one_line("a\n\x1b[31mb") == "a\\n\\x1b[31mb"
    assert one_line("") == "(nothing)"
