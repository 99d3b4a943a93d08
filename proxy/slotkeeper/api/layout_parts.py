"""What the layouts of all APIs have in common: strings in content, tools, options, marks of media."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final

import orjson

from slotkeeper.api.document import Doc, NotOurs
from slotkeeper.api.hash_chain import renders
from slotkeeper.api.openai import HEAD
from slotkeeper.conversation.requests.layout import Path, Role, Section, Text

_MARK_BYTES: Final = 16
# The tools have their own place, and `model` chooses the engine.
_OPTIONS: Final = tuple(key for key in HEAD if key not in {"model", "tools"})
_SECTIONS: Final = {
    Role.SYSTEM: Section.SYSTEM,
    Role.USER: Section.USER,
    Role.ASSISTANT: Section.REPLY,
    Role.TOOL: Section.RESULT,
}


def section_of(role: Role) -> Section:
    """Where the texts of a message of this role stand."""
    return _SECTIONS[role]


def strings(content: Any, path: Path, section: Section, parts: Mapping[str, str]) -> tuple[Text, ...]:
    """The strings of a content that is one, or a list of parts; `parts` names each type's key."""
    if isinstance(content, str):
        return (Text(path, content, section),)
    if not isinstance(content, list):
        return ()
    found = []
    for n, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(kind := part.get("type"), str):
            continue
        key = parts.get(kind)
        if key is not None and isinstance(part.get(key), str):
            found.append(Text((*path, n, key), part[key], section))
    return tuple(found)


def tools(doc: Doc) -> tuple[Doc, ...] | None:
    """The tools as they stand; None where one of them is not an object."""
    offered = doc.get("tools")
    if not isinstance(offered, list):
        return ()
    return tuple(offered) if all(isinstance(tool, dict) for tool in offered) else None


def options(doc: Doc) -> Doc:
    """What else an OpenAI body says to the template. An agent's `tool_choice` only does as `none`."""
    return {key: doc[key] for key in _OPTIONS if doc.get(key) is not None and renders(key, doc[key])}


def mark(part: Doc) -> bytes:
    """Equal for equal media.

    Raises:
        NotOurs: for what is nested deeper than orjson will write.
    """
    try:
        data = orjson.dumps(part, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError as error:
        raise NotOurs("nesting") from error
    return blake2b(data, digest_size=_MARK_BYTES).digest()
