"""Adversarial texts: the search time grows linearly with their length.

The CPU time of this thread is measured, and only its growth counts: a text of eight times the length takes
about eight times as long, and sixty-four times if the growth is quadratic.
"""

from __future__ import annotations

import time
from functools import cache

import pytest
from benchmarks.matchers import TEXTS, all_matchers

from slotkeeper.conversation.layout import MOST, SEARCHED, facts
from slotkeeper.conversation.phrases import FORMS
from slotkeeper.vocab.tokenizer import MAX_BLANKS, too_blank

SMALL, TIMES, TRIES = 2**15, 8, 3
MUCH_FASTER = 3 * TIMES  # than quadratic, and much slower than linear


def seconds(text: str) -> float:
    """Return the least of several tries, since other load only adds to the time."""
    found = []
    for _ in range(TRIES):
        begun = time.thread_time()
        all_matchers(text)
        found.append(time.thread_time() - begun)
    return min(found)


@cache
def least() -> float:
    """Return the time of a plain text: below it a ratio means nothing."""
    return seconds("x" * SMALL)


@pytest.mark.parametrize("make", TEXTS.values(), ids=TEXTS)
def test_search_time_grows_linearly_with_the_length_of_a_text(make):
    assert SMALL * TIMES < SEARCHED, "the longer text is not searched as a whole"
    assert seconds(make(SMALL * TIMES)) < MUCH_FASTER * max(least(), seconds(make(SMALL)))


@pytest.mark.parametrize("blanks", [MAX_BLANKS - 1, MAX_BLANKS, MAX_BLANKS + 1])
def test_a_run_of_blanks_is_found_at_any_place(blanks):
    text = "x" + " " * (MAX_BLANKS - 1) + "x" + " " * blanks + "x"
    assert too_blank(text) == (blanks >= MAX_BLANKS)


def test_only_the_beginning_of_a_long_text_is_searched():
    date = "Today's date: 2026-11-21\n"
    assert len(facts(date + "x\n" * SEARCHED + date)) == 1


def test_the_number_of_facts_of_one_form_is_limited():
    assert len(facts("Today's date: 2026-11-21\n" * (2 * MOST))) == MOST


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.anchor)
def test_no_pattern_of_a_form_searches_for_a_distant_end(form):
    """A pattern that searches for a distant end would do so once for each beginning."""
    assert ".*" not in form.pattern.pattern
    assert "\\Z" not in form.pattern.pattern
