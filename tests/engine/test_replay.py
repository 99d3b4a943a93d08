"""Recorded requests sent to real engines, on every API of the recorded clients."""

from __future__ import annotations

import orjson
import pytest

from slotkeeper.bench import lab
from slotkeeper.bench.replay import merged, read, replay, shot
from slotkeeper.bench.target import Target
from slotkeeper.bench.texts import prose
from slotkeeper.engine.child.launch import free_port

SYSTEM = "Trace of this test. " + prose(3000, 4)
HISTORY = [
    {"role": "user", "content": "What is a slot?"},
    {"role": "assistant", "content": "A sequence of the engine."},
    {"role": "user", "content": "And a checkpoint? " + prose(600, 5)},
]


def item(turn):
    """Return a message as the Responses API writes it."""
    kind = "output_text" if turn["role"] == "assistant" else "input_text"
    return {"type": "message", "role": turn["role"], "content": [{"type": kind, "text": turn["content"]}]}


BODIES = {
    "/v1/chat/completions": lambda turns: {
        "messages": [{"role": "system", "content": SYSTEM + "chat"}, *turns],
        "stream": True,
    },
    "/v1/messages": lambda turns: {
        "system": SYSTEM + "messages",
        "messages": turns,
        "max_tokens": 4000,
        "stream": True,
    },
    "/v1/responses": lambda turns: {
        "instructions": SYSTEM + "responses",
        "input": [item(turn) for turn in turns],
        "stream": True,
    },
    "/completion": lambda turns: {"prompt": SYSTEM + "completion" + "".join(t["content"] for t in turns)},
}


def recorded(folder, paths=tuple(BODIES)):
    """Return a trace of two turns on each route; the second continues the first."""
    lines = []
    for number, path in enumerate(paths):
        for turn, turns in enumerate((HISTORY[:1], HISTORY)):
            body = BODIES[path](turns)
            line = {"t": 10 * number + turn, "client": "test", "session": path, "path": path, "body": body}
            lines.append(orjson.dumps({**line, "headers": {"authorization": "Bearer somebody"}}))
    file = folder / "some.jsonl"
    file.write_bytes(b"\n".join(lines))
    return file


@pytest.fixture
async def sidecar(engine):
    async with lab.sidecar(engine.base, engine.flags) as url:
        yield url


@pytest.mark.parametrize("path", BODIES)
async def test_the_second_turn_of_a_session_is_mostly_cached(engine, tmp_path, path):
    """The oracle uses the prompts that the engine evaluates."""
    async with Target(engine.base) as target:
        entries = merged([read(recorded(tmp_path, [path]))])
        first, second = [(await target.fire(shot(entry, 8))).sample for entry in entries]
    assert first.failure is None
    assert second.failure is None
    assert first.exact
    assert second.exact
    assert first.computed + first.reused == first.prompt
    assert second.reused > 0.5 * first.prompt
    assert second.computed >= second.oracle > 0
    assert second.oracle < second.prompt / 2


async def test_a_replay_through_the_sidecar_shows_both_servers(engine, sidecar, tmp_path, capsys):
    code = await replay([recorded(tmp_path)], base=sidecar, against=engine.base, max_tokens=8)
    shown = capsys.readouterr().out
    assert code == 1  # a second pass that reuses the first one's tokens is no result
    assert "A fault of measurement" in shown
    assert "8 requests in 1 files" in shown
    assert "test/" in shown
    assert shown.count("against") > len(BODIES)
    assert "lead to the same engine" in shown  # there is only one engine, so the comparison means nothing


async def test_a_failed_request_of_a_replay_is_counted_and_named(engine, tmp_path, capsys):
    file = tmp_path / "bad.jsonl"
    bad = {"t": 0, "session": "bad", "path": "/v1/chat/completions", "body": {"messages": "none"}}
    file.write_bytes(orjson.dumps(bad))
    assert await replay([file], base=engine.base, against=None, max_tokens=8) == 1
    shown = capsys.readouterr().out
    assert "1 of 1 requests failed" in shown
    assert "400" in shown


async def test_a_replay_reports_an_unreachable_server_before_it_sends_requests(tmp_path, capsys):
    base = f"http://127.0.0.1:{free_port()}"
    assert await replay([recorded(tmp_path)], base=base, against=None, max_tokens=8) == 1
    assert f"Nothing answers at {base}" in capsys.readouterr().out
