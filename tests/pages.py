"""What pages show to be pasted: blocks of code below their headings, and the commands of a console."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
PART: Final = re.compile(
    r"^#{2,} (?P<heading>[^\n]*)\n|^(?:(?P<above>[^\n]+)\n\n)?```(?P<language>\w+)\n(?P<text>.*?)^```",
    re.MULTILINE | re.DOTALL,
)
PROMPT: Final = re.compile(r"^(?=[$#] )", re.MULTILINE)  # of a user, and of root


class Block(NamedTuple):
    """A block of code, the nearest heading above it, and the line of text above it; "" if there is none."""

    heading: str
    above: str
    text: str

    @property
    def path(self) -> str:
        """Return the file below the user's home that the line above it names first."""
        found = re.match(r"`~/([^`]+)`", self.above)
        assert found, self.above
        return found[1]


def blocks(page: str, language: str) -> list[Block]:
    """Return the blocks of a language; `page` is relative to the checkout."""
    found, heading = [], ""
    for part in PART.finditer((ROOT / page).read_text("utf-8")):
        heading = part["heading"] or heading
        if part["language"] == language:
            found.append(Block(heading, part["above"] or "", part["text"]))
    return found


def shown(page: str, heading: str, language: str) -> list[str]:
    """Return the texts of the blocks of a language below a heading; there is at least one."""
    texts = [block.text for block in blocks(page, language) if block.heading == heading]
    assert texts, f"{page} has no block of {language} below {heading}"
    return texts


def commands(page: str, heading: str | None = None) -> list[str]:
    """Return the commands of a page, or of a part of it, each with its prompt, comment and further lines."""
    wanted = [block.text for block in blocks(page, "console") if heading in {None, block.heading}]
    return [line.rstrip() for text in wanted for line in PROMPT.split(text) if line]
