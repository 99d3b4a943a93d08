"""A conversation as chained digests, so that "B continues A" is a comparison of prefixes, not of text.

Only what reaches the prompt is hashed: clients move cache_control marks, item ids and statuses from one
request to the next without changing a token.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Final

import orjson

from slotkeeper.api.document import Doc, NotOurs, pick, rows
from slotkeeper.api.openai import HEAD

DIGEST_BYTES: Final = 16
_SAMPLING: Final = frozenset({"tool_choice", "parallel_tool_calls", "grammar", "reasoning_format"})
_SPOKEN: Final = ("role", "name", "content", "reasoning_content", "tool_calls", "tool_call_id")


def hash_chain(chat: Doc, lead: int = 0) -> tuple[bytes, ...]:
    """Digests of a chat body: first of all before the messages, then one per message, each over the last.

    `lead` messages (an Anthropic system prompt, Responses instructions) belong to what comes before.
    The chain of the messages does not include the first digest: that two requests have the same
    messages can be seen when their tools differ.
    """
    messages = chat["messages"]
    before = {key: value for key, value in pick(chat, HEAD).items() if renders(key, value)}
    digests = [_chain(b"", [before, [_spoken(message) for message in messages[:lead]]])]
    digest = b""
    for message in messages[lead:]:
        digest = _chain(digest, _spoken(message))
        digests.append(digest)
    return tuple(digests)


def renders(key: str, value: Any) -> bool:
    """Whether it can change the prompt. An agent's `tool_choice` comes and goes: only `none` hides tools."""
    return key not in _SAMPLING or (key == "tool_choice" and value == "none")


def _chain(before: bytes, value: Any) -> bytes:
    try:
        text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError as error:  # nested deeper than it will write
        raise NotOurs("nesting") from error
    return blake2b(before + text, digest_size=DIGEST_BYTES).digest()


def _spoken(message: Doc) -> Doc:
    """The message as the template sees it: a single text part is that text, nothing said is absent."""
    spoken = {key: message[key] for key in _SPOKEN if message.get(key)}
    content = spoken.get("content")
    if isinstance(content, list):
        parts = [{k: v for k, v in part.items() if k != "cache_control"} for part in rows(content)]
        only = parts[0].get("text") if len(parts) == 1 and parts[0].get("type") == "text" else None
        spoken["content"] = only if isinstance(only, str) else parts
    return spoken
