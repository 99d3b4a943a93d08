"""Recordings and Mooncake's traces as load for the simulator."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import orjson
import pytest
from benchmarks.simulator.load import BLOCK, Synthetic, from_files, mooncake

from slotkeeper.bench.replay import LineError, TraceError


def line(at: int, length: int, *blocks: int, answered: int = 50) -> bytes:
    return orjson.dumps(
        {"timestamp": at, "input_length": length, "output_length": answered, "hash_ids": list(blocks)}
    )


def turns(load, name=None):
    return [
        list(begin()) for conversation, begin in load.conversations.items() if name in (None, conversation)
    ]


def chat(at: float, *texts: str, session: str = "s") -> bytes:
    roles = ("system", *("user", "assistant") * len(texts))
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    body = {"messages": messages}
    return orjson.dumps(
        {"t": at, "client": "c", "session": session, "path": "/v1/chat/completions", "body": body}
    )


def test_equal_blocks_become_equal_tokens():
    load = mooncake([line(0, 1100, 0, 7, 8), line(3000, 1600, 0, 7, 9, 10)], name="trace")
    (first, second) = turns(load, "m1")[0]  # two whole blocks of the first are in the second
    assert len(first.prompt) == 1100
    assert first.prompt.lcp(second.prompt) == 2 * BLOCK
    assert second.at == 3.0
    assert len(first.reply) == 50
    assert second.hash_chain[: len(first.hash_chain)] == first.hash_chain


def test_requests_with_one_common_block_are_separate_conversations():
    load = mooncake([line(0, 900, 0, 1), line(0, 900, 0, 2), line(0, 600, 0, 3)], name="trace")
    assert len(load.conversations) == 3


def test_the_number_of_requests_can_be_limited():
    lines = [line(0, 600, 0, n) for n in range(1, 9)]
    assert len(mooncake(lines, name="trace", most=5).conversations) == 5


@pytest.mark.parametrize(
    "bad", [b"{", b"[]", b'{"timestamp": 0}', line(0, 5000, 1, 2), line(0, 0, 1), b'{"timestamp": "x"}']
)
def test_a_line_that_is_not_a_mooncake_request_is_refused(bad):
    with pytest.raises(LineError):
        mooncake([bad], name="trace")


def test_an_empty_trace_is_refused():
    with pytest.raises(LineError, match="holds no request"):
        mooncake([b"\n"], name="trace")


def test_a_recorded_conversation_becomes_turns_that_extend_each_other(tmp_path: Path):
    system, asked, said = "You are an agent. " * 20, "What is in a.py? " * 10, "A function. " * 12
    path = tmp_path / "day.jsonl"
    path.write_bytes(b"\n".join([chat(10.0, system, asked), chat(14.5, system, asked, said, "And b.py?")]))
    ((first, second),) = turns(from_files([path]))
    assert second.prompt.begins_with(first.prompt)
    assert second.prompt.begins_with(first.prompt + first.reply)  # the reply as the client sends it back
    assert (first.at, second.at) == (0.0, 4.5)
    assert second.hash_chain[: len(first.hash_chain)] == first.hash_chain
    assert len(first.prompt) == pytest.approx(len(system + asked) / 4, abs=4)


def test_a_file_without_requests_is_refused(tmp_path: Path):
    (path := tmp_path / "x.jsonl").write_bytes(b'{"path": "/health"}\n')
    with pytest.raises(TraceError):
        from_files([path])
    with pytest.raises(TraceError):
        from_files([tmp_path / "missing.jsonl"])


def test_a_mooncake_trace_is_recognised_by_its_first_line(tmp_path: Path):
    (path := tmp_path / "trace.jsonl").write_bytes(line(0, 600, 0, 1) + b"\n" + line(5, 600, 0, 2))
    assert len(from_files([path]).conversations) == 2


def test_synthetic_turns_extend_each_other():
    for conversation in turns(Synthetic(conversations=3, turns=4).load()):
        assert len(conversation) == 4
        for before, after in pairwise(conversation):
            assert after.prompt.begins_with(before.prompt + before.reply)
            assert after.hash_chain[: len(before.hash_chain)] == before.hash_chain
