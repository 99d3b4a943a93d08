"""Records as documents: figures, plans, and a timeline in order."""

from datetime import UTC, datetime

import orjson
import pytest

from slotkeeper.admin.admin import detail, summary
from slotkeeper.conversation.divergence import Cause
from slotkeeper.conversation.layout import Section
from slotkeeper.conversation.likeness import RequestKind
from slotkeeper.conversation.naming import Name
from slotkeeper.conversation.rules.apply import ShownChange
from slotkeeper.conversation.rules.base import Mode, RuleName
from slotkeeper.observe.request_record import Decision, Option, PromptDivergence, Record, RequestStage
from slotkeeper.observe.sentences import sentences, verdict
from slotkeeper.scheduler.requests.figures import Loss, Lost
from slotkeeper.scheduler.types import Reason
from unit.observe.watched import record

CHOSEN = Option(
    reason=Reason.SNAPSHOT, engine="http://e", slot=1, reuse=900, price=100.04, steps=("restore",)
)
BEATEN = Option(reason=Reason.COLD, engine="http://e", slot=None, reuse=None, price=1100.0)


@pytest.fixture
def whole() -> Record:
    """Return a record with every field."""
    came = record(
        client="c0ffee/cafe",
        named="thread-1",
        body_bytes=4096,
        conversation=3,
        kind=RequestKind.REWRITE,
        decision=Decision(chosen=CHOSEN, beaten=(BEATEN,), rate=500.0, held=1900, common=950),
        divergence=PromptDivergence(
            cause=Cause.DATE,
            section=Section.SYSTEM,
            message=0,
            token=950,
            tokens=800,
            seconds=1.6,
            rule=RuleName.DATE,
            fixed=False,
            was=(1, 2),
            now=(1, 3),
            lead=1,
        ),
        changes=(ShownChange(RuleName.DATE, Mode.OBSERVE, "messages[0].content", "old", "new"),),
        engine="http://e",
        slot=1,
        prompt_tokens=2000,
        cached=900,
        generated=20,
        predicted=950,
        oracle=1000,
        planted=10,
        lost=Lost(Loss.CHECKPOINT, 110),
        reused_seconds=2.0,
        step_seconds=0.2,
        first_token=2.5,
        stall=0.75,
        seconds=4.0,
        outcome="ok",
        status=200,
    )
    came.add(RequestStage.QUEUE, 1000.1, 1000.2)
    came.add(RequestStage.PARSE, 1000.0, 1000.1)
    came.add(RequestStage.RESTORE, 1000.2, 1001.2, tokens=900, note="slotkeeper-1")
    return came


def test_the_summary_has_the_figures_of_the_record(whole):
    line = summary(whole)
    figures = {
        name: line[name] for name in ("prompt_tokens", "cached", "reused", "computed", "oracle", "predicted")
    }
    assert figures == {
        "prompt_tokens": 2000,
        "cached": 900,
        "reused": 890,
        "computed": 1110,
        "oracle": 1000,
        "predicted": 950,
    }
    assert (line["planted"], line["generated"], line["repeated"]) == (10, 20, 910)
    assert (line["seconds"], line["first_token_seconds"], line["saved_seconds"]) == (4.0, 2.5, 1.8)
    assert line["stall_seconds"] == 0.75
    assert (line["id"], line["status"], line["outcome"], line["route"]) == ("r1", 200, "ok", "chat")
    assert (line["client"], line["conversation"], line["named"]) == ("c0ffee/cafe", 3, "thread-1")
    assert (line["kind"], line["engine"], line["slot"]) == ("rewrite", "http://e", 1)
    assert (line["decision"], line["lost"]) == ("snapshot", "checkpoint")
    assert (line["cause"], line["section"], line["where"]) == ("date", "system", "system text (message 1)")
    assert line["verdict"] == verdict(whole)


def test_a_queued_request_belongs_to_the_conversation_of_its_name():
    name = Name("opencode", 7)
    assert summary(record(name=name))["conversation"] == 7
    assert summary(record(name=name, conversation=8))["conversation"] == 8  # it began a new one
    assert summary(record(name=Name("opencode")))["conversation"] is None


def test_the_arrival_time_has_a_time_zone(whole):
    when = datetime.fromisoformat(summary(whole)["came"])
    assert when == datetime.fromtimestamp(whole.received, UTC)


def test_the_detail_contains_the_summary(whole):
    line, account = summary(whole), detail(whole)
    assert {name: account[name] for name in line} == line
    assert (account["body_bytes"], account["lost_tokens"]) == (4096, 110)
    assert account["explanation"] == sentences(whole)


def test_the_timeline_is_sorted_by_time(whole):
    assert detail(whole)["timeline"] == [
        {"stage": "parse", "begin": 0.0, "end": 0.1, "tokens": None, "note": ""},
        {"stage": "queue", "begin": 0.1, "end": 0.2, "tokens": None, "note": ""},
        {"stage": "restore", "begin": 0.2, "end": 1.2, "tokens": 900, "note": "slotkeeper-1"},
    ]


def test_costs_are_shown_in_tokens_and_in_seconds_at_the_rate_of_the_decision(whole):
    choice = detail(whole)["choice"]
    assert (choice["held_tokens"], choice["common_tokens"]) == (1900, 950)
    assert choice["chosen"] == {
        "decision": "snapshot",
        "engine": "http://e",
        "slot": 1,
        "reuse_tokens": 900,
        "price_tokens": 100.0,
        "price_seconds": 0.2001,
        "steps": ["restore"],
    }
    (beaten,) = choice["beaten"]
    assert (beaten["slot"], beaten["reuse_tokens"], beaten["price_seconds"]) == (None, None, 2.2)


def test_without_a_rate_there_is_no_cost_in_seconds(whole):
    whole.decision = Decision(chosen=CHOSEN)
    assert detail(whole)["choice"]["chosen"]["price_seconds"] is None


def test_the_divergence_is_shown_without_its_token_ids(whole):
    told = detail(whole)["parting"]
    assert told["text"] is None
    assert (told["cause"], told["where"], told["token"]) == ("date", "system text (message 1)", 950)
    assert (told["repeated_tokens"], told["seconds"], told["rule"]) == (800, 1.6, "date")
    assert told["fixed"] is False
    assert {"was", "now", "lead"}.isdisjoint(told)


def test_changes_found_by_rules_are_shown(whole):
    (change,) = detail(whole)["changes"]
    assert change == {
        "rule": "date",
        "mode": "observe",
        "declined": False,
        "path": "messages[0].content",
        "before": "old",
        "after": "new",
    }
    whole.changes = (ShownChange(None, Mode.FIX, "messages[1].content", "", ""),)
    assert detail(whole)["changes"][0]["rule"] is None


def test_a_request_that_has_just_arrived_has_a_partial_detail():
    account = detail(record())
    assert (account["outcome"], account["status"], account["verdict"]) == ("running", None, "")
    assert (account["choice"], account["parting"], account["timeline"]) == (None, None, [])
    assert (account["repeated"], account["lost"], account["lost_tokens"]) == (0, None, 0)
    assert orjson.loads(orjson.dumps(account)) == account


def test_summary_and_detail_always_have_the_same_keys(whole):
    assert summary(record()).keys() == summary(whole).keys()
    assert detail(record()).keys() == detail(whole).keys()
    assert orjson.loads(orjson.dumps(detail(whole))) == detail(whole)
