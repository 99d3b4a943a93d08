"""Spans of requests to a real engine: its own figures, and stages that are inside the request's time."""

from __future__ import annotations

import aiohttp

from collector import collecting, values
from slotkeeper.bench import lab
from slotkeeper.bench.texts import prose
from slotkeeper.observe.request_record import RequestStage
from slotkeeper.observe.spans import REQUEST

CHAT = "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "Spans of this test. " + prose(6000, 3)}

LONG = prose(20000)  # so that computing it takes a while on any machine


def body(*texts: str) -> dict:
    messages = [{"role": "user", "content": text} for text in texts]
    return {"messages": [SYSTEM, *messages], "max_tokens": 8, "temperature": 0, "stream": True}


async def test_a_span_has_the_engines_counts_and_the_stages_of_the_request(engine):
    async with collecting() as collector:
        async with lab.sidecar(engine.base, engine.flags, otlp_endpoint=collector.url) as url:
            async with aiohttp.ClientSession(url) as client:
                for sent in (body(LONG), body(LONG, "And two?")):
                    async with client.post(CHAT, json=sent) as answer:
                        assert answer.status == 200
                        await answer.read()
    spans = sorted(collector.named(REQUEST), key=lambda span: span.start_time_unix_nano)
    cold, warm = map(values, spans)
    for said in (cold, warm):
        assert said["http.response.status_code"] == 200
        assert 0 < said["gen_ai.usage.output_tokens"] <= 8
        cached = said["gen_ai.usage.cache_read.input_tokens"]
        assert said["slotkeeper.computed_tokens"] == said["gen_ai.usage.input_tokens"] - cached
        assert said["gen_ai.response.time_to_first_chunk"] > 0
        assert said["slotkeeper.slot"] in {0, 1}
    assert warm["gen_ai.usage.cache_read.input_tokens"] > 0.8 * cold["gen_ai.usage.input_tokens"]
    # If most of the prompt is planted, the request's own few tokens may be too quick for a span.
    planted = cold["slotkeeper.planted_tokens"]
    longest = RequestStage.PLANT if planted > cold["slotkeeper.computed_tokens"] / 2 else RequestStage.PREFILL
    assert f"slotkeeper.{longest.value}" in collector.inside(spans[0])
    plants = [child for child in collector.children(spans[0]) if child.name == "slotkeeper.plant"]
    assert sum(values(plant)["slotkeeper.tokens"] for plant in plants) <= planted
    for span in spans:
        for child in collector.children(span):
            assert child.name in {f"slotkeeper.{stage.value}" for stage in RequestStage}
            assert child.trace_id == span.trace_id
            assert child.start_time_unix_nano <= child.end_time_unix_nano
            # Work beside the request may end after it: the tokenization of a short prompt.
            if child.name != "slotkeeper.render":
                assert span.start_time_unix_nano <= child.start_time_unix_nano
                assert child.end_time_unix_nano <= span.end_time_unix_nano + 1_000_000
