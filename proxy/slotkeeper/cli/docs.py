"""`slotkeeper docs`: lists the pages of the documents, and shows one.

A wheel has the pages beside its modules. It is built from the folder docs, where a checkout has them.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markdown import Markdown

import slotkeeper
from slotkeeper.values import UsageError

PACKAGE: Final = Path(slotkeeper.__file__).parent
FOLDERS: Final = (PACKAGE / "docs", PACKAGE.parents[1] / "docs")  # of a wheel, of a checkout
FIRST: Final = "index"
WIDEST: Final = 110  # columns of text: longer lines are hard to read
_LINK: Final = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<page>[\w./-]+\.md)?(?P<place>#[^)]*)?\)")


def topics() -> dict[str, Path]:
    """Return topic -> page, sorted; empty if this installation has no pages."""
    for folder in FOLDERS:
        found = {path.stem: path for path in sorted(folder.glob("*.md"))}
        if FIRST in found:
            return found
    return {}


def docs(topic: str | None, console: Console) -> int:
    """List the topics, or show one page: on a terminal in a pager, else as Markdown. Returns the exit code.

    Raises UsageError if there is no such page.
    """
    pages = topics()
    if not pages:
        raise UsageError("this installation has no documents: they are in the folder docs of the source")
    if topic is None:
        widest = max(map(len, pages))
        for name, page in pages.items():
            print(f"{name:{widest}}  {title(page)}")  # noqa: T201
        return 0
    text = _page(pages, topic).read_text("utf-8")
    if not sys.stdout.isatty():
        print(text, end="")  # noqa: T201 - a program reads it: the page as it was written
        return 0
    os.environ.setdefault("LESS", "-R")  # or the usual pager shows colours as escape codes
    with console.pager(styles=True):
        shown = Markdown(for_terminal(text, pages), hyperlinks=False)
        console.print(shown, width=min(console.width, WIDEST))
    return 0


def title(page: Path) -> str:
    return page.read_text("utf-8").partition("\n")[0].lstrip("# ")


def for_terminal(text: str, pages: Mapping[str, Path]) -> str:
    """Return a page with links that a terminal can show: a topic instead of a file, no anchors."""

    def shown(link: re.Match[str]) -> str:
        topic = (link["page"] or "").removesuffix(".md")
        worth_naming = topic in pages and topic != link["text"]
        return f"[{link['text']}]({topic})" if worth_naming else link["text"]

    return _LINK.sub(shown, text)


def _page(pages: Mapping[str, Path], topic: str) -> Path:
    name = topic.rpartition("/")[2].removesuffix(".md").lower()
    if name in pages:
        return pages[name]
    near = get_close_matches(name, pages, n=1)
    guess = f"; did you mean `{near[0]}`?" if near else ":"
    raise UsageError(f"there is no page `{topic}`{guess} `slotkeeper docs` lists all topics")
