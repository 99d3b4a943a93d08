"""Headers: which are passed on, the names of our own, and what of a request must not be written down.

Some clients call their session, or themselves, by their key. What is written down of a request, in a log, in
the journal, in a metric or in a recording, holds none of its own credentials, and nothing that looks like a
key of another client.
"""

from __future__ import annotations

import re
from binascii import Error, a2b_base64
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from string import ascii_letters, digits
from typing import Any, Final, Self
from urllib.parse import parse_qsl

import orjson
from multidict import CIMultiDict

from slotkeeper.api.document import Doc, table

NAMES: Final = ("auth", "cookie", "key", "secret", "token", "password")  # in the name of what holds one
LEAST: Final = 12  # characters; what is shorter may be a part of any word, and is sought as a whole word only
LONGEST: Final = 64  # characters of a name of which the answer is kept
MASK: Final = "***"
# Keys of OpenAI, Anthropic, Hugging Face, GitHub, Slack; and signed tokens.
_SHAPED: Final = re.compile(
    r"\b(?:(?:sk|pk|hf|gh[oprsu]|github_pat|xox[a-z])[-_][\w-]{16,}|(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Secrets:
    """Those of one request."""

    words: frozenset[str]

    @classmethod
    def of(cls, headers: Mapping[str, str], query: str = "") -> Self:
        """Every value of a header, or of a field of the query, whose name sounds like a credential's."""
        found = [word for name, value in headers.items() if tells_secret(name) for word in _words(value)]
        if query and tells_secret(query):
            found += [value for name, value in parse_qsl(query) if tells_secret(name)]
        return cls(frozenset(found))

    def stand_in(self, text: str) -> bool:
        """Whether a text must not be written down."""
        whole = text.split()
        own = any(word in (text if len(word) >= LEAST else whole) for word in self.words)
        return own or _SHAPED.search(text) is not None

    def without(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        """The headers less those in which a secret stands under a name that does not say so."""
        open_ = [(name, value) for name, value in headers.items() if not tells_secret(name)]
        if not self.stand_in("\n".join([value for _, value in open_])):  # of nearly every request, at once
            return headers
        left = CIMultiDict(headers)
        for name in {name for name, value in open_ if self.stand_in(value)}:
            left.popall(name)
        return left

    def masked(self, data: bytes) -> bytes:
        """A body with its own request's credentials made unreadable. As JSON it stays what it was."""
        for word in self.words:
            if len(word) >= LEAST:
                data = data.replace(word.encode(errors="replace"), MASK.encode())
        return data


def tells_secret(name: str) -> bool:
    """Whether something that is called so holds a credential."""
    return _known(name) if len(name) <= LONGEST else _tells(name)


def _tells(name: str) -> bool:
    lower = name.lower()
    return any(part in lower for part in NAMES)


_known = lru_cache(maxsize=512)(_tells)  # asked three times of each header of every request


def masked(text: str) -> str:
    """A text of unknown origin, with whatever looks like a key made unreadable."""
    return _SHAPED.sub(MASK, text)


def _words(value: str) -> Iterator[str]:
    """The secret parts of a header: not the scheme before a key, nor the name of a cookie."""
    words = value.replace(";", " ").split()
    scheme = words.pop(0).lower() if len(words) > 1 and words[0].isalpha() else ""
    for word in words:
        name, _, cookie = word.rstrip("=").partition("=")
        if not cookie or len(cookie) >= LEAST:  # a short cookie is a preference
            yield cookie or name
    if scheme == "basic":
        yield from _password(words[0])


def _password(basic: str) -> Iterator[str]:
    try:
        password = a2b_base64(basic.encode(errors="replace")).decode(errors="replace").partition(":")[2]
    except Error:
        return
    if password:
        yield password


# -- headers: which are passed on, and our own -----------------------------------------------------------

REQUEST_ID: Final = "X-Request-Id"
SLOT: Final = "X-Slotkeeper-Slot"
DECISION: Final = "X-Slotkeeper-Decision"
PREDICTED: Final = "X-Slotkeeper-Predicted"  # tokens that we expect the engine to reuse
PLANTED: Final = "X-Slotkeeper-Planted"  # tokens computed a moment before for this very request
REWRITTEN: Final = "X-Slotkeeper-Rewritten"  # the rules that changed the request on its way
CONVERSATION: Final = "X-Slotkeeper-Conversation"  # a client's hint, and what an answer calls it
BYPASS: Final = "X-Slotkeeper-Bypass"  # "1": straight through, unpinned
HOPS: Final = "X-Slotkeeper-Hops"  # the sidecars that a request has come through, to notice a circle

AUTH: Final = ("Authorization", "X-Api-Key")  # what llama-server reads, in its order

TRACE_PARENT: Final = "traceparent"  # W3C Trace Context

# RFC 9110 section 7.6.1, and proxy-connection, which is not in it but which clients send.
HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "proxy-connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    },
)

_SAFE_ID: Final = re.compile(r"[A-Za-z0-9._~:+/=@-]{1,128}")


def forwardable(
    headers: Iterable[tuple[str, str]],
    *,
    drop: Collection[str] = (),
) -> list[tuple[str, str]]:
    """The headers that go on, in order and with every value: not those of this hop, not those in `drop`."""
    pairs = list(headers)
    unwanted = HOP_BY_HOP | {name.lower() for name in drop}
    for name, value in pairs:
        if name.lower() == "connection":
            unwanted |= {token.strip().lower() for token in value.split(",")}
    return [(name, value) for name, value in pairs if name.lower() not in unwanted]


def hops(values: Iterable[str]) -> list[str]:
    """The sidecars named in every `HOPS` header of a request, the first in front."""
    return [name for value in values for part in value.split(",") if (name := part.strip())]


def request_id(value: str | None, fresh: Callable[[], str]) -> str:
    """The client's own id where it is safe in a log and a header, else a fresh one."""
    return value if value is not None and _SAFE_ID.fullmatch(value) else fresh()


# -- a client's own name for its conversation ------------------------------------------------------------
# It means something only together with the client: two may use the same.

LONGEST_NAME: Final = 512  # characters: longer is data, not a name
# The most telling first. Codex gives its main agent, its sub-agents and its compactions one session and one
# cache key, and each agent a thread of its own.
SESSION_HEADERS: Final = (
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
    offers = [name for header in SESSION_HEADERS if (name := _name(given.get(header)))]
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
    return value if isinstance(value, str) and 0 < len(value) <= LONGEST_NAME else None


def _session(user: Any) -> Any:
    """The session in Claude Code's `user_..._account_..._session_...`, or in the JSON that it became."""
    if not isinstance(user, str):
        return None
    if not user.startswith("{"):
        _, found, session = user.rpartition(_SESSION)
        fits = found and len(session) <= LONGEST_NAME and _OF_SESSIONS.issuperset(session)
        return session if fits else None
    try:
        told = orjson.loads(user)
    except orjson.JSONDecodeError:
        return None
    return told.get("session_id") if isinstance(told, dict) else None
