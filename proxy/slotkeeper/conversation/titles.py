"""The title of a conversation, as a model has written it for the agent that asked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

LONGEST: Final = 60  # characters
LOOKED_AT: Final = 4000  # characters of an answer
LINE: Final = 400  # of them, in the line that is the title
_THOUGHT: Final = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_LABEL: Final = re.compile(r"(?:#+ *|[-*] +|\**title\** *: *)+", re.IGNORECASE)
_QUOTES: Final = "\"'`*“”„«» "


def title_in(reply: Mapping[str, Any]) -> str:
    """Of an assistant's message in chat shape; empty where it is none.

    Either a JSON object with a `title`, or the first line of text.
    """
    content = reply.get("content")
    if not isinstance(content, str):
        return ""
    text = _THOUGHT.sub("", content[:LOOKED_AT])
    title = _in_json(text)
    if title is None:
        title = next((line for line in map(squeezed, text.splitlines()) if line), "")
    title = _LABEL.sub("", squeezed(title)[:LINE], count=1).strip(_QUOTES)
    return title if len(title) <= LONGEST else title[: LONGEST - 1].rstrip() + "…"


def squeezed(text: str) -> str:
    """In one line, without what cannot be seen, and without the quotes around it."""
    seen = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(seen.split()).strip(_QUOTES)


def _in_json(text: str) -> str | None:
    """None where there is no object; else its title, if that is a text."""
    start, end = text.find("{"), text.rfind("}")
    if not 0 <= start < end:
        return None
    try:
        told = json.loads(text[start : end + 1])
    except ValueError:
        return None
    title = told.get("title") if isinstance(told, dict) else None
    return title if isinstance(title, str) else ""
