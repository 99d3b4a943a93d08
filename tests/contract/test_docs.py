"""The documents agree with the code, with each other, and with the code's citations of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from scripts import loaded
from slotkeeper.scheduler.types import Reason

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
PAGES: Final = sorted([ROOT / "README.md", *DOCS.glob("*.md")])
SOURCES: Final = sorted(
    path for folder in ("proxy", "tests") for path in (ROOT / folder).rglob("*.py") if path != Path(__file__)
)
# Files that documents may name before they exist, because a command writes them.
LATER: Final = frozenset({"docs/benchmarks.md"})

LINK: Final = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PLACE: Final = r"(?:T\d+|\d+(?:\.\d+)*)"
# "engine.md 1.4", "engine.md section 3", "engine.md sections 1.2, 4 and T6", "T1..T10 of engine.md"
CITED: Final = re.compile(rf"engine\.md,?\s+(?:sections?\s+)?({PLACE}(?:(?:,\s*|\s+and\s+){PLACE})*)")
RANGE: Final = re.compile(r"\b(T\d+)\.\.(T\d+)\b")
PAGE: Final = re.compile(r"\b([a-z][\w-]*\.md)\b")  # in capitals: files of agents and their users


generate: Final = loaded(DOCS / "generate.py")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def places() -> set[str]:
    """Return every section and trap of engine.md, as the code names them."""
    titles = generate.heading_anchors((DOCS / "engine.md").read_text("utf-8"))
    heads = (re.match(rf"({PLACE})[.: ]", title + " ") for title in titles)
    return {head[1] for head in heads if head}


def spots(pattern: re.Pattern[str], path: Path) -> list[tuple[int, re.Match[str]]]:
    """Yield every match with its line; comments and docstrings that break over lines are joined first."""
    text = path.read_text("utf-8")
    joined = re.sub(r"\n\s*#?\s*", lambda gap: " " * len(gap[0]), text)
    return [(text.count("\n", 0, match.start()) + 1, match) for match in pattern.finditer(joined)]


# -- generated tables ----------------------------------------------------------------------------------


def test_generated_tables_of_the_docs_equal_the_code():
    assert generate.main(["--check"]) == 0, "run `python docs/generate.py`"


def test_a_stale_generated_table_is_detected_and_repaired(tmp_path, capsys):
    (tmp_path / "docs").mkdir()
    for name in generate.BLOCKS:
        text = (ROOT / name).read_text("utf-8")
        (tmp_path / name).write_text(text, "utf-8")
    stale = tmp_path / "docs" / "reference.md"
    stale.write_text(stale.read_text("utf-8").replace("`ram_cache`", "`magic`"), "utf-8")

    assert generate.main(["--check"], tmp_path) == 1
    assert "reference.md" in capsys.readouterr().err
    assert "`magic`" in stale.read_text("utf-8")

    assert generate.main([], tmp_path) == 0
    assert stale.read_text("utf-8") == (DOCS / "reference.md").read_text("utf-8")


def test_a_page_without_its_table_markers_is_an_error():
    with pytest.raises(KeyError, match="settings"):
        generate.filled("# nothing here\n", {"settings": lambda: "x"})


def test_every_reason_is_described_in_the_code():
    texts = generate.descriptions(Reason)
    assert [reason for reason in Reason if not texts.get(reason.name)] == []


# -- links ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_relative_link_has_a_target(page):
    broken = []
    for link in LINK.findall(page.read_text("utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if relative(target) in LATER and not target.exists():
            continue
        exists = target.exists()
        known = generate.heading_anchors(target.read_text("utf-8")).values() if exists and anchor else ()
        if not exists or (anchor and anchor not in known):
            broken.append(link)
    assert not broken, f"{relative(page)} links to nothing at {broken}"


def test_anchors_of_headings_are_computed_as_on_github():
    anchors = generate.heading_anchors("# One: two\n```\n# no heading\n```\n### T5: /v1/x drops `a_b`\n")
    assert set(anchors.values()) == {"one-two", "t5-v1x-drops-a_b"}


# -- citations -----------------------------------------------------------------------------------------


def test_the_code_cites_only_existing_sections_of_engine_md():
    known = places()
    wrong = []
    for path in SOURCES:
        for line, match in spots(CITED, path):
            wrong += [(f"{relative(path)}:{line}", p) for p in re.findall(PLACE, match[1]) if p not in known]
        for line, match in spots(RANGE, path):
            wrong += [(f"{relative(path)}:{line}", trap) for trap in match.groups() if trap not in known]
    assert wrong == []


def test_every_trap_that_the_code_names_is_described_in_engine_md():
    known = places()
    named = {
        (f"{relative(path)}:{line}", match[1])
        for path in SOURCES
        for line, match in spots(re.compile(r"\((?:[^()\n]*[ (])?(T\d+)\)"), path)
    }
    assert named, "the pattern finds nothing"
    assert sorted(spot for spot in named if spot[1] not in known) == []


def test_every_document_that_the_code_names_exists():
    beside_their_tests = {"kept.md", "promises.md"}
    there = {page.name for page in PAGES} | {"CHANGELOG.md"} | beside_their_tests
    unknown = {
        f"{relative(path)}:{line} {match[1]}"
        for path in SOURCES
        for line, match in spots(PAGE, path)
        if match[1] not in there | {Path(name).name for name in LATER}
    }
    notes = {
        f"{relative(path)}:{line}" for path in SOURCES for line, _ in spots(re.compile("field-notes"), path)
    }
    assert sorted(unknown | notes) == []


# -- the map of tests ----------------------------------------------------------------------------------


def test_the_map_of_tests_names_every_folder_and_package_and_only_existing_files():
    text = (ROOT / "tests" / "README.md").read_text("utf-8")
    first_cells = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    packages = {path.parent.name for path in (ROOT / "proxy" / "slotkeeper").glob("*/__init__.py")}
    folders = {path.name for path in (ROOT / "tests").iterdir() if any(path.glob("test_*.py"))}
    assert first_cells == packages | folders
    for named in re.findall(r"`([\w/]+/test_\w+\.py)`", text):
        assert (ROOT / "tests" / named).exists(), named


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_no_code_span_is_broken_over_two_lines(page):
    prose = re.sub(
        r"(?ms)^ *```.*?^ *```", lambda block: "\n" * block[0].count("\n"), page.read_text("utf-8")
    )
    assert [n for n, line in enumerate(prose.split("\n"), 1) if line.count("`") % 2] == []
