"""`python -m benchmarks.simulator` in a terminal and for programs."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from benchmarks.simulator.__main__ import main

SMALL = ["--conversations", "3", "--turns", "2", "--system-tokens", "600", "--first-tokens", "100"]


def refused(words: list[str], capsys: Any) -> str:
    """Return what the command says of arguments that it does not accept."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "usage" in said
    return said


def test_the_text_output_has_a_line_for_each_fleet(capsys):
    assert main(["--engines", "2", "--way", "lmetric", "--way", "one-sidecar", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "2 engines, synthetic: 6 conversations of 2 turns" in out
    for word in ("lmetric", "one-sidecar", "local", "shared", "hit rate", "TTFT p50"):
        assert word in out


def test_the_json_output_has_a_line_for_each_fleet(capsys):
    assert main(["--engines", "1,2", "--way", "round-robin", "--files", "none", "--json", *SMALL]) == 0
    rows = [orjson.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["engines"], row["way"], row["files"]) for row in rows] == [
        (1, "one-sidecar", "none"),
        (2, "round-robin", "none"),
    ]
    assert all(row["requests"] == row["engines"] * 6 for row in rows)


def test_sizes_and_rates_accept_units_and_exponents(capsys):
    words = [
        "--engines",
        "1",
        "--token-bytes",
        "32KiB",
        "--save-rate",
        "5e8",
        "--prefill-rate",
        "300",
        "--json",
    ]
    assert main([*words, *SMALL]) == 0
    assert orjson.loads(capsys.readouterr().out)["first_token_p50"] > 0


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--engines", "0"], "0 is not between 1 and 500 engines"),
        (["--engines", "1,many"], "'many' is not a whole number"),
        (["--prefill-rate", "0"], "0 is not between 0.001 and 1000000000"),
        (["--pause", "inf"], "inf is not between 0.001 and 1000000000"),
        (["--hot-bytes", "inf"], "inf is not between 1 and 1152921504606846976 bytes"),
        (["--store-bytes", "nan"], "nan is not between 1 and"),
        (["--token-bytes", "9" * 400 + "GB"], "is not a size"),
        (["--turn-tokens", "100000000000"], "100000000000 is not between 1 and 1048576 tokens"),
        (["--slots", "257"], "257 is not between 1 and 256"),
        (["--conversations", "1000001"], "1000001 is not between 1 and 1000000"),
        (["--requests", "-1"], "-1 is not between 1 and"),
        (["--seed", "-1"], "-1 is not between 0 and 4294967295"),
        (["--prefill-rate", "fast"], "'fast' is not a number; write it as in 2.5"),
        (["--token-bytes", "large"], "'large' is not a size; write it as a number of bytes"),
        (["--slots", "4.0"], "'4.0' is not a whole number"),
        (["--way", "by-luck"], "choose from"),
    ],
)
def test_wrong_arguments_are_a_usage_error_that_says_what_to_write(words, hint, capsys):
    said = refused(words, capsys)
    assert f"argument {words[0]}: " in said
    assert hint in said


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"timestamp": "nan"}, "line 2: `timestamp` is not a time in milliseconds"),
        ({"timestamp": 1e300}, "line 2: `timestamp` is not a time in milliseconds"),
        ({"output_length": 100_000_000_000}, "line 2: `output_length` is 100000000000, more than 1048576"),
    ],
)
def test_a_line_of_a_mooncake_trace_that_cannot_be_simulated_is_named(wrong, said, tmp_path, capsys):
    good = {"timestamp": 0, "input_length": 500, "output_length": 9, "hash_ids": [1]}
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(orjson.dumps(good) + b"\n" + orjson.dumps(good | wrong) + b"\n")
    assert said in refused([str(trace)], capsys)


def test_a_missing_trace_is_a_usage_error(tmp_path, capsys):
    assert "day.jsonl" in refused([str(tmp_path / "day.jsonl")], capsys)
