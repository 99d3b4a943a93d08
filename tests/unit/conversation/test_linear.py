"""Texts that are made to be slow: the time grows linearly with their length, whatever is in them.

Time is that of this thread, and only how it grows counts: a text eight times as long takes about eight times
as long, and at a square of it sixty-four times.
"""

from __future__ import annotations

import time

import pytest
from benchmarks.matchers import TEXTS, all_matchers

from slotkeeper.conversation.facts import MOST, SEARCHED, facts
from slotkeeper.conversation.phrases import FORMS
from slotkeeper.vocab.bpe import MAX_BLANKS, too_blank

SMALL, TIMES, TRIES = 2**15, 8, 5
MUCH_FASTER = 3 * TIMES  # than a square, much slower than a line


def seconds(text: str) -> float:
    """Return the least of several tries, since other load only adds to the time."""
    found = []
    for _ in range(TRIES):
        begun = time.thread_time()
        all_matchers(text)
        found.append(time.thread_time() - begun)
    return min(found)


@pytest.mark.parametrize("make", TEXTS.values(), ids=TEXTS)
def test_time_grows_with_the_length_of_a_text_and_no_faster(make):
    least = seconds("x" * SMALL)  # what is done with any text of this length: below it a ratio says nothing
    assert seconds(make(SMALL * TIMES)) < MUCH_FASTER * max(least, seconds(make(SMALL)))


def test_the_smaller_text_is_searched_whole_and_so_is_the_larger():
    assert SMALL * TIMES < SEARCHED


@pytest.mark.parametrize("blanks", [MAX_BLANKS - 1, MAX_BLANKS, MAX_BLANKS + 1])
def test_a_run_of_blanks_is_found_wherever_it_stands(blanks):
    text = "x" + " " * (MAX_BLANKS - 1) + "x" + " " * blanks + "x"
    assert too_blank(text) == (blanks >= MAX_BLANKS)


def test_only_the_beginning_of_a_long_text_is_searched():
    date = "Today's date: 2026-11-21\n"
    assert len(facts(date + "x\n" * SEARCHED + date)) == 1


def test_what_has_more_facts_of_a_form_than_any_program_writes_is_data():
    assert len(facts("Today's date: 2026-11-21\n" * (2 * MOST))) == MOST


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.anchor)
def test_every_form_that_has_an_end_says_so_outside_of_its_pattern(form):
    """A pattern that searches for a distant end would do so once for each beginning."""
    assert ".*" not in form.pattern.pattern
    assert "\\Z" not in form.pattern.pattern
