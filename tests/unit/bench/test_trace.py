"""Traces of other recorders: complete, compressed, damaged."""

from __future__ import annotations

import lzma

import orjson
import pytest

from slotkeeper.bench.replay import TraceError, merged, read

LINE = {
    "t": 2.5,
    "client": "pi",
    "session": "main1",
    "path": "/v1/chat/completions",
    "headers": {"x-session-id": "1"},
    "body": {"messages": [{"role": "user", "content": "Grüß Gott"}]},
}


def written(folder, *lines, name="some.jsonl"):
    file = folder / name
    data = b"\n".join(line if isinstance(line, bytes) else orjson.dumps(line) for line in lines)
    file.write_bytes(lzma.compress(data) if name.endswith(".xz") else data)
    return file


@pytest.mark.parametrize("name", ["some.jsonl", "some.jsonl.xz"])
def test_a_line_is_read_with_all_its_fields(tmp_path, name):
    (entry,) = read(written(tmp_path, LINE, name=name)).entries
    assert (entry.at, entry.client, entry.session, entry.path) == (2.5, "pi", "main1", LINE["path"])
    assert entry.headers == {"x-session-id": "1"}
    assert entry.body == LINE["body"]


def test_a_body_keeps_the_order_of_its_keys(tmp_path):
    body = {"z": 1, "a": {"y": 2, "b": 3}}
    (entry,) = read(written(tmp_path, {**LINE, "body": body})).entries
    assert orjson.dumps(entry.body) == orjson.dumps(body)


def test_only_the_path_is_required(tmp_path):
    (entry,) = read(written(tmp_path, {"path": "/health"}, name="probe.jsonl.xz")).entries
    assert (entry.at, entry.client, entry.session, entry.method) == (0.0, "?", "probe", "POST")
    assert entry.body is None


def test_a_body_may_be_stored_as_text(tmp_path):
    (entry,) = read(written(tmp_path, {**LINE, "body": '{"prompt": "x"}'})).entries
    assert entry.body == {"prompt": "x"}


def test_unknown_fields_of_the_recorder_are_ignored(tmp_path):
    more = {**LINE, "method": "post", "kind": "title", "response_message": [1], "body_bytes": 7}
    (entry,) = read(written(tmp_path, more)).entries
    assert (entry.method, entry.kind) == ("POST", "title")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"path": "/v1/chat', "not JSON"),
        (b"[1, 2]", "an object is expected, not list"),
        ({"body": {}}, "`path` is missing"),
        ({"path": "v1"}, "does not begin with /"),
        ({"path": "/v1", "body": [1]}, "`body` should be an object, not list"),
        ({"path": "/v1", "body": "no"}, "`body` is a text that is not JSON"),
    ],
)
def test_a_damaged_line_is_skipped_and_reported(tmp_path, line, reason):
    file = written(tmp_path, LINE, b"", line, LINE)
    trace = read(file)
    assert len(trace.entries) == 2
    (problem,) = trace.problems
    assert problem.startswith(f"{file}:3: ")
    assert reason in problem


def test_a_file_without_a_request_is_not_a_trace(tmp_path):
    with pytest.raises(TraceError, match=r"some\.jsonl:1: not JSON"):
        read(written(tmp_path, b"hello"))
    with pytest.raises(TraceError, match="is empty"):
        read(written(tmp_path, b"\n"))


def test_an_unreadable_file_is_not_a_trace(tmp_path):
    with pytest.raises(TraceError, match="No such file"):
        read(tmp_path / "missing.jsonl")
    damaged = tmp_path / "cut.jsonl.xz"
    damaged.write_bytes(lzma.compress(orjson.dumps(LINE))[:-9])
    with pytest.raises(TraceError, match=r"cut\.jsonl\.xz"):
        read(damaged)


def test_sessions_recorded_at_the_same_time_are_interleaved(tmp_path):
    one = read(written(tmp_path, {**LINE, "t": 1}, {**LINE, "t": 3}, name="a.jsonl"))
    other = read(written(tmp_path, {**LINE, "t": 2, "session": "b"}, name="b.jsonl"))
    assert [entry.session for entry in merged([one, other])] == ["main1", "b", "main1"]


def test_without_times_the_order_of_the_file_is_kept(tmp_path):
    lines = [{"path": f"/{number}"} for number in range(5)]
    trace = read(written(tmp_path, *lines))
    assert [entry.path for entry in merged([trace])] == ["/0", "/1", "/2", "/3", "/4"]
