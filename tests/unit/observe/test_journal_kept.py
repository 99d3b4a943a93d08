"""Which requests the journal keeps, for how long, and how one of them is found."""

import pytest

from playbooks.playbook import (
    arrives,
    ends,
    engine_lost,
    goes,
    knows,
    leaves,
    reports,
    sees,
    starts,
)
from slotkeeper.observe import journal as journals
from slotkeeper.observe.journal import Journal
from slotkeeper.observe.request_record import Record
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.types import RequestId
from unit.observe.watched import WatchedPlay, record

A = Tokens(range(10_000, 12_000))


# -- what is kept ------------------------------------------------------------------------------------------


def test_the_journal_keeps_the_latest_requests_with_the_newest_first():
    journal = Journal(3)
    for n in range(5):
        journal.arrived(record(f"r{n}"))
    assert [one.request_id for one in journal] == ["r4", "r3", "r2"]
    assert len(journal) == 3


def test_a_journal_of_size_0_keeps_no_records_but_still_completes_them():
    """Other readers of a record, such as the span exporter, need it complete."""
    play = WatchedPlay(memory="dense", journal=Journal(0))
    came = play.comes("r1")
    assert play << knows("r1", A) >> goes("r1") << ends("r1", 2000, 0) >> reports("r1")
    assert (len(play.journal), list(play.journal), play.journal.find("r1")) == (0, [], None)
    assert came.decision is not None
    assert came.oracle == 2000
    assert repr(play.journal) == "<Journal 0 requests, 0 under way>"


def test_the_number_of_followed_requests_is_limited(monkeypatch):
    monkeypatch.setattr(journals, "FOLLOWED", 10)
    journal = Journal(5)
    first, last = record("first"), record("last")
    journal.follow(RequestId("1:first"), first)
    for n in range(10):
        journal.follow(RequestId(f"{n + 2}:x"), record("x"))
    journal.follow(RequestId("99:last"), last)
    assert repr(journal) == "<Journal 0 requests, 10 under way>"
    for key in ("1:first", "99:last"):
        journal.saw(leaves(key), [], 1001.0, 1001.0, lambda _: None)
    assert (first.spans, len(last.spans)) == ([], 1)


def test_events_of_unknown_requests_are_ignored():
    play = WatchedPlay(memory="dense")
    for happening in (
        arrives("x"),
        knows("x", A),
        starts("x"),
        ends("x"),
        leaves("x"),
        sees(),
        engine_lost(),
    ):
        play << happening
    assert repr(play.journal) == "<Journal 0 requests, 0 under way>"


# -- lookup by id ------------------------------------------------------------------------------------------


@pytest.fixture
def four() -> Journal:
    journal = Journal(10)
    for at, name in enumerate(("abc-1234", "xyz-1234", "1234", "r1")):
        journal.arrived(record(name, at=float(at)))
    return journal


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("abc-1234", "abc-1234"),
        ("z-1234", "xyz-1234"),
        ("-1234", "xyz-1234"),  # of two, the newer one
        ("1234", "1234"),  # an exact id precedes the end of another
        ("r1", "r1"),  # short, but complete
        ("234", None),  # too short for the end of an id
        ("", None),
        ("abc", None),  # the beginning of an id
        ("ABC-1234", None),
    ],
)
def test_a_request_is_found_by_its_id_or_the_end_of_it(four, wanted, found):
    one = four.find(wanted)
    assert (one.request_id if one else None) == found


def test_the_newer_of_two_requests_with_the_same_id_is_found(four):
    four.arrived(record("abc-1234", at=50.0))
    assert four.find("abc-1234").at == 50.0


# -- which request took the slot ---------------------------------------------------------------------------


def ran(journal: Journal, name: str, conversation: int | None, slot: int) -> Record:
    came = record(name, conversation=conversation, engine="e0", slot=slot)
    journal.arrived(came)
    return came


def test_the_slot_was_taken_by_the_first_request_that_ran_in_it_afterwards():
    journal = Journal(10)
    ran(journal, "mine", 1, 0)
    ran(journal, "elsewhere", 2, 1)
    taker = ran(journal, "taker", 3, 0)
    ran(journal, "later", 4, 0)
    mine = ran(journal, "mine again", 1, 1)
    ran(journal, "after", 5, 0)
    assert journal.took_slot(mine) is taker


@pytest.mark.parametrize("conversation", [1, None])
def test_a_request_without_an_earlier_one_has_no_request_that_took_its_slot(conversation):
    journal = Journal(10)
    ran(journal, "other", 2, 0)
    assert journal.took_slot(ran(journal, "mine", conversation, 0)) is None


def test_a_dropped_record_has_no_request_that_took_its_slot():
    journal = Journal(2)
    dropped = ran(journal, "mine", 1, 0)
    for n in range(3):
        ran(journal, f"r{n}", 1, 0)
    assert journal.took_slot(dropped) is None
