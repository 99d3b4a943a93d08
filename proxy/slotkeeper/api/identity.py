"""What a client itself calls its conversation, in headers or in the body.

A name tells conversations apart only together with whose they are: two clients may use the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from string import ascii_letters, digits
from typing import Any, Final

import orjson

from slotkeeper.api.document import Doc, table
from slotkeeper.api.headers import CONVERSATION
from slotkeeper.api.secrets import Secrets

LIMIT: Final = 512  # characters: longer is data, not a name
# The most telling first. Codex gives its main agent, its sub-agents and its compactions one session and one
# cache key, and each agent a thread of its own.
HEADERS: Final = (
    CONVERSATION.lower(),
    "thread-id",
    "x-conversation-id",
    "x-session-id",
    "session-id",
    "session_id",
    "x-session-affinity",
    "x-affinity",
)
_KEYS: Final = ("conversation", "conversation_id", "thread_id", "session_id", "chat_id", "prompt_cache_key")
_TABLES: Final = ("client_metadata", "", "metadata")  # "": the body itself
_USER: Final = "user_id"
_SESSION: Final = "_session_"
_OF_SESSIONS: Final = frozenset(f"{ascii_letters}{digits}-")


def named(headers: Mapping[str, str], doc: Doc) -> str | None:
    """The most telling name that a request gives its conversation; None where it gives none.

    A user's id is no name of a conversation unless it holds a session (Claude Code's does): a user has many.
    """
    given = {name.lower(): value for name, value in headers.items()}
    offers = [name for header in HEADERS if (name := _name(given.get(header)))]
    if (name := _in_body(doc) or _name(_session(table(doc, "metadata").get(_USER)))) is not None:
        offers.append(name)
    secrets = Secrets.of(given) if offers else None
    return next((name for name in offers if secrets and not secrets.stand_in(name)), None)


def offered(doc: Doc) -> str | None:
    """Whatever the body alone offers as a name, the id of a user at the last."""
    return _in_body(doc) or _name(doc.get(_USER)) or _name(table(doc, "metadata").get(_USER))


def _in_body(doc: Doc) -> str | None:
    for source in _TABLES:
        values = table(doc, source) if source else doc
        for key in _KEYS:
            value = values.get(key)
            if key == "conversation" and isinstance(value, dict):  # the Responses API's object
                value = value.get("id")
            if name := _name(value):
                return name
    return None


def _name(value: Any) -> str | None:
    return value if isinstance(value, str) and 0 < len(value) <= LIMIT else None


def _session(user: Any) -> Any:
    """The session in Claude Code's `user_..._account_..._session_...`, or in the JSON that it became."""
    if not isinstance(user, str):
        return None
    if not user.startswith("{"):
        _, found, session = user.rpartition(_SESSION)
        fits = found and len(session) <= LIMIT and _OF_SESSIONS.issuperset(session)
        return session if fits else None
    try:
        told = orjson.loads(user)
    except orjson.JSONDecodeError:
        return None
    return told.get("session_id") if isinstance(told, dict) else None
