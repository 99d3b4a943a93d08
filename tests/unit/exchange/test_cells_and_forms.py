"""An answer is held back only while it may be the error that no KV cell is left, for any chunks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotkeeper.api.answers.answer import Answer
from slotkeeper.api.answers.answer_builder import Figures
from slotkeeper.api.head import Api
from slotkeeper.api.request import parse
from slotkeeper.engine.answers import Health
from slotkeeper.exchange.exchange import CellsGate, OutOfCells, form_for, gate_for
from slotkeeper.scheduler.effects import Forward
from slotkeeper.scheduler.events import EngineUp, Exceeded
from slotkeeper.scheduler.placement import Placement
from slotkeeper.scheduler.slots.engine_model import EngineTraits, Known, Memory
from slotkeeper.scheduler.types import EngineId, Reason, RequestId
from unit.runtime.stubs import ENGINE, TRAITS, StubLink

ERROR = b'data: {"error":{"code":500,"message":"Context size has been exceeded.","type":"server_error"}}\n\n'
OF_MESSAGES = b'event: error\ndata: {"code":500,"message":"Context size has been exceeded."}\n\n'
OTHER = b'data: {"error":{"code":500,"message":"Something else.","type":"server_error"}}\n\n'
WORD = b'data: {"choices":[{"delta":{"content":"Context size has been exceeded"}}]}\n\n'
PING = b": ping\n\n"


def gate(*, shut: bool = True) -> tuple[CellsGate, list[Exceeded]]:
    told: list[Exceeded] = []
    driver = SimpleNamespace(post=told.append, now=lambda: 1.0)
    return CellsGate(cast("Any", driver), RequestId("1:r"), shut=shut), told


def cut(text: bytes, places: list[int]) -> list[bytes]:
    at = sorted({0, len(text), *(place % len(text) for place in places)})
    return [text[begin:end] for begin, end in pairwise(at)]


@given(stream=st.sampled_from([ERROR, OF_MESSAGES, PING + ERROR]), places=st.lists(st.integers(0, 500)))
def test_no_byte_of_a_context_size_error_is_sent_to_the_client(stream, places):
    shut, told = gate()
    passed: list[bytes] = []
    with pytest.raises(OutOfCells):
        passed.extend(shut.passing(piece) for piece in cut(stream, places))
    assert b"".join(passed) in {b"", PING}
    assert [event.again for event in told] == [True]
    assert shut.lacked


@given(
    events=st.lists(st.sampled_from([OTHER, WORD, PING]), min_size=1, max_size=4),
    more=st.booleans(),
    places=st.lists(st.integers(0, 500)),
)
def test_every_other_stream_is_passed_on_unchanged(events, more, places):
    stream = b"".join([*events, *([WORD, ERROR] if more else [])])
    shut, told = gate()
    if all(event is PING for event in events) and not more:
        places = []
    passed = b"".join(shut.passing(piece) for piece in cut(stream, places)) + shut.close()
    assert passed == stream
    assert told == []


def test_the_error_of_a_request_that_was_already_sent_again_is_passed_on():
    open_, told = gate(shut=False)
    assert open_.passing(ERROR) == ERROR
    open_.last = ERROR
    open_.ended(Answer(figures=Figures(), reply=None, complete=False, error="server_error"))
    assert [event.again for event in told] == [False]
    assert open_.lacked


def test_an_answer_that_quotes_the_error_text_has_not_failed():
    shut, told = gate()
    shut.last = WORD
    shut.ended(Answer(figures=Figures(), reply=None, complete=True, error=None))
    assert told == []


@pytest.mark.parametrize(
    ("traits", "gated"),
    [
        (TRAITS.corrected(Known.FLAGS, unified=True), True),
        (TRAITS.corrected(Known.FLAGS, unified=False), False),
        (TRAITS, True),  # unknown: the first failure shows it
        (replace(TRAITS, n_slots=1), False),
        (replace(TRAITS, memory=Memory.RECURRENT), False),
    ],
    ids=["shared", "apart", "not known", "one slot", "recurrent"],
)
def test_the_gate_is_used_only_if_slots_may_share_a_kv_buffer(traits: EngineTraits, gated: bool):
    engine = EngineId("e")
    placement = Placement(engine)
    placement.on(EngineUp(at=1.0, engine=engine, traits=traits, fresh=True))
    forward = Forward(request=RequestId("1:r"), engine=engine, slot=0, reason=Reason.PREFIX)
    driver = cast("Any", SimpleNamespace(placement=placement))
    assert (gate_for(driver, forward, outgrown=False) is not None) == gated


@pytest.mark.parametrize(
    ("health", "asks"), [(Health.OK, True), (Health.FOREIGN, False), (Health.SWAPPER, False)]
)
def test_progress_is_requested_only_of_a_llama_server(health: Health, asks: bool):
    """Other servers, and the peers of llama-swap, may refuse a field that they do not know."""
    body = b'{"messages":[],"stream":true}'
    link = StubLink()
    link.health = health
    forward = Forward(request=RequestId("1:r"), engine=ENGINE, slot=None, reason=Reason.SLOTLESS)
    form = form_for(parse(Api.CHAT, body), body, forward, link)
    assert (form.body != body, form.progress is not None) == (asks, asks)
