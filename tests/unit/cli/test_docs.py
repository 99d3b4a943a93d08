"""`slotkeeper docs` shows the pages, from a checkout and from a wheel, and every message names them by it."""

from __future__ import annotations

import ast
import os
import pty
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from containers import ROOT
from slotkeeper.cli.docs import for_terminal, title, topics

PACKAGE = ROOT / "proxy" / "slotkeeper"
PAGES = {path.stem: path for path in (ROOT / "docs").glob("*.md")}
BUILD = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"


def test_without_a_topic_every_page_is_listed_with_its_title(run_cli):
    code, out, _ = run_cli("docs")
    assert code == 0
    assert set(topics()) == set(PAGES)
    for topic, page in PAGES.items():
        assert f"{topic} {title(page)} " in out


@pytest.mark.parametrize("topic", ["agents", "agents.md", "docs/agents.md", "Agents"])
def test_a_page_that_is_piped_is_its_markdown(topic, capfd):
    from slotkeeper.cli.main import main

    assert main(["docs", topic]) == 0
    assert capfd.readouterr().out == PAGES["agents"].read_text("utf-8")


def test_an_unknown_topic_is_a_usage_error_that_suggests_a_topic(run_cli):
    code, out, err = run_cli("docs", "trouble-shooting")
    assert (code, out) == (2, "")
    assert "`troubleshooting`" in err
    assert "`slotkeeper docs`" in err


def test_on_a_terminal_a_page_is_rendered_and_opens_in_the_pager():
    """The pager is a program of ours that marks what it gets."""
    pager = f"""{sys.executable} -c 'import sys; print("PAGED", sys.stdin.read())'"""
    leader, follower = pty.openpty()
    env = {**os.environ, "PAGER": pager, "TERM": "xterm", "COLUMNS": "90"}
    words = [sys.executable, "-m", "slotkeeper", "docs", "recording"]
    with subprocess.Popen(words, stdin=follower, stdout=follower, stderr=follower, env=env) as process:
        os.close(follower)
        shown = b"".join(read_all(leader)).decode()
    os.close(leader)
    assert process.returncode == 0
    assert shown.startswith("PAGED")
    assert "Recording requests" in shown
    assert "# Recording requests" not in shown
    assert "\x1b[" in shown, "no colours"
    assert "rules.md" not in shown, "a terminal cannot follow a link to a file"


def read_all(leader: int) -> Iterator[bytes]:
    while True:
        try:
            part = os.read(leader, 2**16)
        except OSError:  # Linux: the other end was closed
            return
        if not part:
            return
        yield part


def test_links_become_topics_and_anchors_disappear():
    text = "[a](rules.md#date) [rules](rules.md) [b](#here) [c](adr/README.md) [d](http://x.example/Y.md)"
    assert for_terminal(text, PAGES) == "[a](rules) rules b c [d](http://x.example/Y.md)"


# -- messages --------------------------------------------------------------------------------------------


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield every string of a module that can reach a user: all but docstrings, with its line."""
    tree = ast.parse(path.read_text("utf-8"))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = (node.body for node in ast.walk(tree) if isinstance(node, kinds))
    docstrings = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


@cache
def texts() -> list[tuple[str, str]]:
    """Return every text of the package that can reach a user, with its place."""
    found = []
    for path in sorted(PACKAGE.rglob("*")):
        place = str(path.relative_to(ROOT))
        if path.suffix == ".py":
            found += [(f"{place}:{line}", text) for line, text in strings(path)]
        elif path.suffix in {".html", ".js", ".css"}:
            found.append((place, path.read_text("utf-8")))
    return found


def test_no_message_names_the_file_of_a_page():
    """A package has no folder docs at hand: a message names the command that shows the page."""
    file = re.compile(rf"\b(?:docs/[\w/-]+|{'|'.join(PAGES)})\.md\b")
    assert [(place, found[0]) for place, text in texts() if (found := file.search(text))] == []


def test_every_topic_that_a_message_names_exists():
    named = [
        (place, topic) for place, text in texts() for topic in re.findall(r"slotkeeper docs ([a-z-]+)", text)
    ]
    assert len(named) > 5
    assert [(place, topic) for place, topic in named if topic not in PAGES] == []


# -- the wheel -------------------------------------------------------------------------------------------


def test_a_wheel_has_the_pages_once_and_shows_them(tmp_path):
    subprocess.run([sys.executable, "-c", BUILD, tmp_path], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(installed := tmp_path / "installed")
    assert {Path(name).name for name in names if name.startswith("slotkeeper/docs/")} == {
        page.name for page in PAGES.values()
    }
    assert {path.relative_to(PACKAGE.parent).as_posix() for path in PACKAGE.rglob("*.py")} <= set(names)
    assert {"slotkeeper/py.typed", "slotkeeper/bench/texts.txt.gz"} <= set(names)
    assert not (PACKAGE / "docs").exists(), "git has one copy"
    done = subprocess.run(
        [sys.executable, "-m", "slotkeeper", "docs", "agents"],
        env={**os.environ, "PYTHONPATH": str(installed)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == PAGES["agents"].read_text("utf-8")
