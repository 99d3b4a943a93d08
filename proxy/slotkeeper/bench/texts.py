"""Texts and messages to measure with: parts of Python's documentation, so no recorded prompts are needed.

They come with the project (texts.LICENSE): those of the running Python differ by its version.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

from slotkeeper.api.document import Doc

STRIDE: Final = 7919 * 13  # neighbouring seeds begin far apart in the text


@cache
def library() -> str:
    """Return 450,000 characters: the help topics of Python 3.11."""
    return gzip.decompress(Path(__file__).with_name("texts.txt.gz").read_bytes()).decode("ascii")


def prose(characters: int, seed: int = 0) -> str:
    """Return about `characters` of text, from a place that depends on the seed."""
    text = library()
    start = (seed * STRIDE) % (len(text) - characters - 1)
    return text[start : start + characters].strip()


def system(text: str | None = None) -> Doc:
    return {"role": "system", "content": prose(8000, 1) if text is None else text}


def edited(history: Sequence[Doc], at: int, text: str) -> tuple[Doc, ...]:
    """Return the history with another text in the message at index `at`."""
    changed = list(history)
    changed[at] = {**changed[at], "content": text}
    return tuple(changed)


def title(history: Sequence[Doc], head: str = "") -> tuple[Doc, ...]:
    """Return a title request as clients send it: another system prompt, and only the chat's beginning.

    `head`: with which that system prompt begins.
    """
    beginning = {"role": "user", "content": history[1]["content"][:600]}
    return (system(head + "Write a short title for this chat."), beginning)


def result(reply: Doc, text: str) -> Doc:
    """Return the message with a tool's result for the first call in `reply`."""
    calls = reply.get("tool_calls") or [{"id": "x"}]
    return {"role": "tool", "tool_call_id": calls[0]["id"], "content": text}
