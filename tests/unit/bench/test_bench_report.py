"""The report of `slotkeeper bench`: what it shows, what it never holds, and two of them compared."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import orjson
import pytest

from slotkeeper.bench.bench_report import ROWS, compared, headline, markdown, page, read, rows, written
from slotkeeper.values import UsageError


def report(**changed: Any) -> dict[str, Any]:
    """Return a report of two ways in which everything is known."""
    known = {row.name: number for number, row in enumerate(ROWS, start=1)}
    return {
        "slotkeeper": "9.9",
        "date": "2026-01-02",
        "machine": {"cores": 4, "processor": "<Ryzen> & co", "system": "Linux"},
        "engine": {"build": "b1", "model": "model.gguf"},
        "rounds": 1,
        "ways": {"stock": known, "Slotkeeper": {**known, "waited_seconds": 1.5, **changed}},
    }


def cells(text: str) -> list[list[str]]:
    """Return the cells of a table of Markdown."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line
    ]


def test_every_figure_is_a_row_and_what_no_way_knows_is_none():
    table = cells(markdown(report()))
    assert table[0] == ["", "stock", "Slotkeeper"]
    assert [line[0] for line in table[2:]] == [row.about for row in ROWS]
    unknown = report(watt_seconds=None)
    unknown["ways"]["stock"]["watt_seconds"] = None
    assert "energy of the machine" not in [row.about for row, _ in rows(unknown)]
    unknown["ways"]["stock"]["watt_seconds"] = 5.0
    (shown,) = (each for row, each in rows(unknown) if row.name == "watt_seconds")
    assert shown == ["5 Ws", "-"]


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.rows = 0
        self.bars: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.rows += tag == "tr"
        if known.get("class") == "bar":
            self.bars.append(known["style"] or "")
        self.links += [value or "" for name, value in attrs if name in {"src", "href"}]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_needs_no_other_file_and_shows_the_same_figures():
    found = Page()
    found.feed(page(report(waited_seconds=None)))
    assert found.links == []
    assert found.rows == 1 + len(ROWS)
    assert found.bars == ["width:100.0%", "width:0.0%", "width:100.0%", "width:100.0%"]
    assert any("<Ryzen> & co" in text for text in found.text)
    assert "-" in found.text


def test_a_report_is_written_in_three_forms_and_read_again(tmp_path):
    files = written(report(), tmp_path / "mine")
    assert [file.suffix for file in files] == [".json", ".md", ".html"]
    assert read(files[0]) == report()
    assert headline(report()) in files[1].read_text()


def test_a_folder_that_is_not_there_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="--report"):
        written(report(), tmp_path / "none" / "mine")


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"ways": 3}', orjson.dumps({"ways": {"stock": {}}})])
def test_another_file_is_no_report(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_bytes(text)
    with pytest.raises(UsageError, match="is no report"):
        read(path)
    with pytest.raises(UsageError, match="No such file"):
        read(Path(tmp_path / "nothing.json"))


def test_two_reports_are_compared_in_what_both_know():
    one, other = report(), report(waited_seconds=3.0, watt_seconds=None)
    other["ways"]["new"] = {}
    found = {(way, about): times for way, about, _, _, times in compared(one, other)}
    waited = next(row.about for row in ROWS if row.name == "waited_seconds")
    assert found["Slotkeeper", waited] == "2.00"
    assert found["stock", waited] == "1.00"
    assert len(found) == 2 * len(ROWS) - 1
    one["ways"]["stock"]["failed"] = 0
    assert ("stock", "failed") in {(way, about) for way, about, *_ in compared(one, other)}
