"""`slotkeeper simulate` in a terminal and for programs."""

from __future__ import annotations

import orjson
import pytest

from slotkeeper.cli.main import main

SMALL = ["--conversations", "3", "--turns", "2", "--system-tokens", "600", "--first-tokens", "100"]


def test_the_text_output_has_a_line_for_each_fleet(capsys):
    assert main(["simulate", "--engines", "2", "--way", "lmetric", "--way", "one-sidecar", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "2 engines, synthetic: 6 conversations of 2 turns" in out
    for word in ("lmetric", "one-sidecar", "local", "shared", "hit rate", "TTFT p50"):
        assert word in out


def test_the_json_output_has_a_line_for_each_fleet(capsys):
    assert (
        main(["simulate", "--engines", "1,2", "--way", "round-robin", "--files", "none", "--json", *SMALL])
        == 0
    )
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
    assert main(["simulate", *words, *SMALL]) == 0
    assert orjson.loads(capsys.readouterr().out)["first_token_p50"] > 0


@pytest.mark.parametrize(
    "words",
    [
        ["--engines", "0"],
        ["--engines", "501"],
        ["--engines", "many"],
        ["--prefill-rate", "0"],
        ["--token-bytes", "-5"],
        ["--way", "by-luck"],
    ],
)
def test_wrong_arguments_are_a_usage_error(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *words])
    assert ended.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_a_missing_trace_is_a_usage_error(tmp_path, capsys):
    assert main(["simulate", str(tmp_path / "day.jsonl")]) == 2
    assert "day.jsonl" in capsys.readouterr().err
