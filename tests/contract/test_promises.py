"""promises.md names the tests of every line of docs/security.md, and they exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "security.md"
PROMISES: Final = Path(__file__).with_name("promises.md")
ROW: Final = re.compile(r"^\| (.+?) \| (.+) \|$", re.MULTILINE)
TEST: Final = re.compile(r"`([\w/]+\.py::\w+)`")
TOLD: Final = re.compile(r"^\* (.+)$", re.MULTILINE)


def promised() -> dict[str, list[str]]:
    """Return words of the page -> the tests that show that they are true."""
    rows = ROW.findall(PROMISES.read_text("utf-8"))
    return {words: TEST.findall(tests) for words, tests in rows if TEST.search(tests)}


def told() -> list[str]:
    """Return words of the lines that promise nothing."""
    return TOLD.findall(PROMISES.read_text("utf-8").partition("\n## ")[2])


def lines() -> list[str]:
    """Return the page's sentences, points and rows, without headings, examples and heads of tables."""
    prose = re.sub(r"^```.*?^```", "", PAGE.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^\|.*\n\|---.*\n", "", prose, flags=re.MULTILINE)
    return [line for line in prose.splitlines()[1:] if line and not line.startswith("#")]


def test_every_line_of_the_page_has_a_test_or_promises_nothing():
    words = [*promised(), *told()]
    assert len(words) > 50, "the search finds nothing"
    assert [line for line in lines() if not any(each in line for each in words)] == []


def test_what_is_promised_is_on_the_page():
    page = lines()
    assert [words for words in (*promised(), *told()) if not any(words in line for line in page)] == []


def test_every_named_test_is_collected():
    """By pytest itself, which fails for a name that it does not find."""
    named = sorted({f"tests/{test}" for tests in promised().values() for test in tests})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:randomly", *named]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-2000:]
