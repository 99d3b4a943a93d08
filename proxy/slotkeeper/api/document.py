"""What bodies of all APIs have in common: how they are read, hashed and laid out, and the name they give.

Functions that read a document are small and total. They follow the engine's own `json_value`: a key that is
missing, null or of another type is its default.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from string import ascii_letters, digits
from typing import Any, Final

import orjson

from slotkeeper.api.head import CONVERSATION, Api, Secrets
from slotkeeper.conversation.layout import Layout, Message, Path, Role, Section, Text

Doc = dict[str, Any]
Prompt = str | list[Any]  # text, token ids, or strings and ids mixed

# Not orjson: the engine writes 1e-05 and 1e+22 as Python does, and the text of a tool call's arguments
# becomes part of the prompt.
_COMPACT: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)


class NotOurs(Exception):  # noqa: N818 (not an error: the engine may answer it all the same)
    """What we cannot make out. The engine may still answer it, or say better than we what is wrong."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a body of any API comes down to."""

    chat: Doc | None = None  # for /apply-template
    lead: int = 0  # how many of the first messages stand outside the client's own list (system, instructions)
    prompt: Prompt | None = None
    media: bool = False


def text(doc: Doc, key: str, default: str = "") -> str:
    """The string under `key`."""
    value = doc.get(key)
    return value if isinstance(value, str) else default


def table(doc: Doc, key: str) -> Doc:
    """The object under `key`, or an empty one."""
    value = doc.get(key)
    return value if isinstance(value, dict) else {}


def rows(value: Any) -> list[Doc]:
    """The objects of a list; other elements are left out."""
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def integer(value: Any) -> int | None:
    """A JSON integer, which in Python must not be a bool."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def compact(value: Any) -> str:
    """JSON text as the engine's own `dump()` writes it: no spaces, keys in their order."""
    try:
        return _COMPACT.encode(value)
    except RecursionError as error:
        raise NotOurs("nesting") from error


def pick(doc: Doc, keys: tuple[str, ...]) -> Doc:
    """The part of `doc` under `keys`."""
    return {key: doc[key] for key in keys if key in doc}


# -- messages as a hash chain ----------------------------------------------------------------------------
# Only what reaches the prompt is hashed: clients move cache_control marks, item ids and statuses from one
# request to the next without changing a token.
#
# A client sends its whole history each time. What is equal to the last request's is not laid out again, and
# comparing the two is immediate.

# What stands before the messages or decides how they are rendered. `model` chooses the template in router
# mode (engine.md 7). A grammar can come with its own template text, so schemas count.
HEAD: Final = (
    "model",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "functions",
    "function_call",
    "chat_template",
    "chat_template_kwargs",
    "enable_thinking",
    "reasoning_effort",
    "reasoning_format",
    "response_format",
    "json_schema",
    "grammar",
    "add_generation_prompt",
    "continue_final_message",
)
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


# -- requests seen before: a message that stood there is the very same object ----------------------------

RECENT: Final = 16  # requests of all clients; several sessions of one agent are told apart
LIMIT: Final = 32 << 20  # bytes of their bodies
_LISTS: Final = {Api.CHAT: "messages", Api.MESSAGES: "messages", Api.RESPONSES: "input"}


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """A client's own list of messages, and what was made of each."""

    raw: Sequence[Any]
    messages: Sequence[Message]
    strict: bool  # arguments are objects in them, and to Python 1, 1.0 and true are equal

    def start(self, given: Sequence[Any]) -> int:
        """How many messages are the same, from the first on."""
        for at, (one, other) in enumerate(zip(self.raw, given, strict=False)):
            if one is not other and (one != other or (self.strict and _written(one) != _written(other))):
                return at
        return min(len(self.raw), len(given))


def seen(api: Api, doc: Doc, layout: Layout) -> SeenRequest | None:
    """What the next request may have in common with this one; None where nothing is worth keeping."""
    raw = doc.get(_LISTS.get(api, ""))
    if not isinstance(raw, list) or any(message.media for message in layout.messages):
        return None
    return SeenRequest(raw, layout.messages[len(layout.messages) - len(raw) :], strict=api is Api.MESSAGES)


def listed(
    given: Sequence[Doc], key: str, make: Callable[[Doc, Path], Message], before: SeenRequest | None
) -> tuple[Message, ...]:
    """The messages of a client's list under `key`. What `make` raises comes through."""
    start = before.start(given) if before else 0
    rest = (make(given[n], (key, n)) for n in range(start, len(given)))
    return (*(before.messages[:start] if before else ()), *rest)


class RecentRequests:
    """The last requests of all clients."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._kept: deque[tuple[Api, str, SeenRequest, int]] = deque()
        self._limit = limit
        self._size = 0

    def __repr__(self) -> str:
        return f"<Recent {len(self._kept)} requests>"

    def of(self, api: Api, client: str) -> list[SeenRequest]:
        """Those of one client, the latest first."""
        return [kept for of, who, kept, _ in reversed(self._kept) if of is api and who == client]

    def add(self, api: Api, client: str, doc: Doc, layout: Layout, size: int) -> SeenRequest | None:
        """Remember it, unless its body of `size` bytes is too large; what there is to remember."""
        kept = seen(api, doc, layout)
        if kept is None or size > self._limit:
            return kept
        self._kept.append((api, client, kept, size))
        self._size += size
        while self._size > self._limit or len(self._kept) > RECENT:
            self._size -= self._kept.popleft()[-1]
        return kept


def most_like(recent: Iterable[SeenRequest], api: Api, doc: Doc) -> SeenRequest | None:
    """The one that has most in common with `doc`."""
    given = doc.get(_LISTS.get(api, ""))
    return max(recent, key=lambda kept: kept.start(given), default=None) if isinstance(given, list) else None


def _written(value: Any) -> bytes:
    return orjson.dumps(value)


# -- strings, tools, options, marks of media -------------------------------------------------------------

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
