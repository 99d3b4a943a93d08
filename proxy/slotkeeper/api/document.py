"""What bodies of all APIs have in common: reading JSON, hash chains, layouts, and the name that they give.

Functions that read a document are small and total. They follow the engine's own `json_value`: a key that is
missing, null or of another type has its default.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from io import BytesIO
from string import ascii_letters, digits
from typing import Any, Final

import orjson

from slotkeeper.api.head import CONVERSATION, Api, Secrets
from slotkeeper.conversation.layout import Layout, Message, Path, Role, Section, Text

Doc = dict[str, Any]
Prompt = str | list[Any]  # text, token ids, or strings and ids mixed

# Not orjson: the engine writes 1e-05 and 1e+22 as Python does, and the text of a tool call's arguments is
# part of the prompt.
_COMPACT: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
_SIXTEEN: Final = re.compile(r"\d{16}\.\d")
_STRING_OR_SIXTEEN: Final = re.compile(r'"(?:[^"\\]++|\\.)*+"|\d{16}\.\d+')


class NotOurs(Exception):  # noqa: N818 (not an error: the engine may still answer it)
    """A request that we cannot interpret. The engine may still answer it, or report better what is wrong."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The prompt of a body, in one form for all APIs: a chat, or a raw prompt; neither if it is unknown."""

    chat: Doc | None = None  # for /apply-template
    lead: int = 0  # how many first messages are not in the client's own list (system, instructions)
    prompt: Prompt | None = None
    media: bool = False  # the prompt has images or audio


def text(doc: Doc, key: str, default: str = "") -> str:
    """Return the string under `key`."""
    value = doc.get(key)
    return value if isinstance(value, str) else default


def table(doc: Doc, key: str) -> Doc:
    """Return the object under `key`, or an empty one."""
    value = doc.get(key)
    return value if isinstance(value, dict) else {}


def rows(value: Any) -> list[Doc]:
    """Return the objects of a list, without its other elements."""
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def integer(value: Any) -> int | None:
    """Return the value if it is a JSON integer, else None. A bool is not one, as it is in Python."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def compact(value: Any) -> str:
    """Return JSON text as the engine's own `dump()` writes it: no spaces, keys in their order.

    Raises NotOurs for values that are nested too deep.
    """
    try:
        written = _COMPACT.encode(value)
    except RecursionError as error:
        raise NotOurs("nesting") from error
    return _STRING_OR_SIXTEEN.sub(_exponent, written) if _SIXTEEN.search(written) else written


def _exponent(found: re.Match[str]) -> str:
    """Write a fraction from 1e15 to 1e16 with an exponent: the engine does, Python begins at 1e16."""
    if found[0].startswith('"'):
        return found[0]
    digits = found[0].replace(".", "").rstrip("0")
    return f"{digits[0]}{'.' * (len(digits) > 1)}{digits[1:]}e+15"


def pick(doc: Doc, keys: tuple[str, ...]) -> Doc:
    """Return the part of `doc` under `keys`."""
    return {key: doc[key] for key in keys if key in doc}


# -- messages as a hash chain ----------------------------------------------------------------------------
# Only values that reach the prompt are hashed: clients move cache_control marks, item ids and statuses from
# one request to the next without changing a token.
#
# A client sends its whole history each time. Messages that equal those of the last request are not laid out
# again, and are compared at once.

# Keys that precede the messages in the prompt or decide how they are rendered. `model` chooses the template
# in router mode (engine.md 13). A grammar can bring its own template text, so schemas count.
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
    """Return the digests of a chat body: first all before the messages, then one per message, chained.

    `lead` messages (an Anthropic system prompt, Responses instructions) belong to the part before the
    messages. The chain of the messages does not include the first digest, so that two requests with the same
    messages are recognized when their tools differ. Raises NotOurs for messages that are nested too deep.
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
    """Whether a key can change the prompt. Agents vary `tool_choice`: only `none` hides tools."""
    return key not in _SAMPLING or (key == "tool_choice" and value == "none")


def _chain(before: bytes, value: Any) -> bytes:
    try:
        text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError as error:  # nested deeper than orjson writes
        raise NotOurs("nesting") from error
    return blake2b(before + text, digest_size=DIGEST_BYTES).digest()


def _spoken(message: Doc) -> Doc:
    """Return the message as the template sees it: one text part becomes its text, empty values are absent."""
    spoken = {key: message[key] for key in _SPOKEN if message.get(key)}
    content = spoken.get("content")
    if isinstance(content, list):
        parts = [{k: v for k, v in part.items() if k != "cache_control"} for part in rows(content)]
        only = parts[0].get("text") if len(parts) == 1 and parts[0].get("type") == "text" else None
        spoken["content"] = only if isinstance(only, str) else parts
    return spoken


# -- recent requests, whose message objects are used again -----------------------------------------------

RECENT: Final = 16  # requests of all clients: room for several sessions of one agent
LIMIT: Final = 32 << 20  # bytes of their bodies together
_LISTS: Final = {Api.CHAT: "messages", Api.MESSAGES: "messages", Api.RESPONSES: "input"}


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """A client's own list of messages, and the message made of each."""

    raw: Sequence[Any]
    messages: Sequence[Message]
    strict: bool  # compare JSON texts too: arguments are objects, and 1, 1.0 and true are equal in Python

    def start(self, given: Sequence[Any]) -> int:
        """Return how many first messages are the same in both lists."""
        for at, (one, other) in enumerate(zip(self.raw, given, strict=False)):
            if one is not other and (one != other or (self.strict and _written(one) != _written(other))):
                return at
        return min(len(self.raw), len(given))


def seen(api: Api, doc: Doc, layout: Layout) -> SeenRequest | None:
    """Return what the next request may share with this one; None if it has media, or no list of messages."""
    raw = doc.get(_LISTS.get(api, ""))
    if not isinstance(raw, list) or any(message.media for message in layout.messages):
        return None
    return SeenRequest(raw, layout.messages[len(layout.messages) - len(raw) :], strict=api is Api.MESSAGES)


def listed(
    given: Sequence[Doc], key: str, make: Callable[[Doc, Path], Message], before: SeenRequest | None
) -> tuple[Message, ...]:
    """Return the messages of a client's list under `key`. Exceptions of `make` pass through."""
    start = before.start(given) if before else 0
    rest = (make(given[n], (key, n)) for n in range(start, len(given)))
    return (*(before.messages[:start] if before else ()), *rest)


class RecentRequests:
    """The latest requests of all clients."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._kept: deque[tuple[Api, str, SeenRequest, int]] = deque()
        self._limit = limit
        self._size = 0

    def __repr__(self) -> str:
        return f"<Recent {len(self._kept)} requests>"

    def of(self, api: Api, client: str) -> list[SeenRequest]:
        """Return the requests of one client, the latest first."""
        return [kept for of, who, kept, _ in reversed(self._kept) if of is api and who == client]

    def add(self, api: Api, client: str, doc: Doc, layout: Layout, size: int) -> SeenRequest | None:
        """Remember a request, unless its body of `size` bytes is too large. Returns what can be shared."""
        kept = seen(api, doc, layout)
        if kept is None or size > self._limit:
            return kept
        self._kept.append((api, client, kept, size))
        self._size += size
        while self._size > self._limit or len(self._kept) > RECENT:
            self._size -= self._kept.popleft()[-1]
        return kept


def most_like(recent: Iterable[SeenRequest], api: Api, doc: Doc) -> SeenRequest | None:
    """Return the request that has the most first messages in common with `doc`; None if there is none."""
    given = doc.get(_LISTS.get(api, ""))
    if not isinstance(given, list):
        return None
    best, most = None, -1
    for kept in sorted(recent, key=lambda kept: len(kept.raw), reverse=True):
        if len(kept.raw) <= most:  # the next turn of a conversation: earlier turns need not be compared
            break
        if (start := kept.start(given)) > most:
            best, most = kept, start
    return best


def _written(value: Any) -> bytes:
    return orjson.dumps(value)


# -- strings, tools, options, marks of media -------------------------------------------------------------

_MARK_BYTES: Final = 16
# Tools have a field of their own, and `model` chooses the engine.
_OPTIONS: Final = tuple(key for key in HEAD if key not in {"model", "tools"})
SECTIONS: Final = {  # of a text in a message, by the message's role
    Role.SYSTEM: Section.SYSTEM,
    Role.USER: Section.USER,
    Role.ASSISTANT: Section.REPLY,
    Role.TOOL: Section.RESULT,
}


def strings(content: Any, path: Path, section: Section, parts: Mapping[str, str]) -> tuple[Text, ...]:
    """Return the strings of a content, which is a string or a list of parts.

    `parts` maps the type of a part to the key of its string; parts of other types are skipped.
    """
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
    """Return the tools as given; None if one of them is not an object."""
    offered = doc.get("tools")
    if not isinstance(offered, list):
        return ()
    return tuple(offered) if all(isinstance(tool, dict) for tool in offered) else None


def options(doc: Doc) -> Doc:
    """Return the other keys of an OpenAI body that reach the template; `tool_choice` only if it is `none`."""
    return {key: doc[key] for key in _OPTIONS if doc.get(key) is not None and renders(key, doc[key])}


def mark(part: Doc) -> bytes:
    """Return a digest that is equal for equal media.

    Raises:
        NotOurs: for values nested deeper than orjson writes.
    """
    try:
        data = orjson.dumps(part, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError as error:
        raise NotOurs("nesting") from error
    return blake2b(data, digest_size=_MARK_BYTES).digest()


# -- a client's own name for its conversation ------------------------------------------------------------
# A name is only unique together with its client: two clients may use the same one.

LONGEST_NAME: Final = 512  # characters: longer is data, not a name
# The most specific first. Codex gives its main agent, its sub-agents and its compactions one session and one
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
    "x-claude-code-session-id",
)
_KEYS: Final = ("conversation", "conversation_id", "thread_id", "session_id", "chat_id", "prompt_cache_key")
_TABLES: Final = ("client_metadata", "", "metadata")  # "": the body itself
_USER: Final = "user_id"
_SESSION: Final = "_session_"
_OF_SESSIONS: Final = frozenset(f"{ascii_letters}{digits}-")


def named(headers: Mapping[str, str], doc: Doc) -> str | None:
    """Return the most specific name that a request gives its conversation; None if it gives none.

    A user's id does not name a conversation, as a user has many, unless it holds a session, as Claude Code's
    does.
    """
    given = {name.lower(): value for name, value in headers.items()}
    offers = [name for header in SESSION_HEADERS if (name := _name(given.get(header)))]
    if (name := _in_body(doc) or _name(_session(table(doc, "metadata").get(_USER)))) is not None:
        offers.append(name)
    secrets = Secrets.of(given) if offers else None
    return next((name for name in offers if secrets and not secrets.stand_in(name)), None)


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
    """Return the session in Claude Code's `user_..._account_..._session_...`, or in its later JSON form."""
    if not isinstance(user, str):
        return None
    if not user.startswith("{"):
        _, found, session = user.rpartition(_SESSION)
        fits = found and len(session) <= LONGEST_NAME and _OF_SESSIONS.issuperset(session)
        return session if fits else None
    try:
        doc = orjson.loads(user)
    except orjson.JSONDecodeError:
        return None
    return doc.get("session_id") if isinstance(doc, dict) else None


# -- bodies that are heavy by their images --------------------------------------------------------------

# Parses and changes a body that is heavy by its images, without stopping the event loop.
#
# The JSON parser keeps the interpreter's lock. So long runs of base64 are cut out of the body, the rest is
# parsed, and each string is then put together again, in steps between which other threads run. The lock is
# also kept while bytes are counted or copied, and new memory is slow: 64 MB take 40 to 300 ms (measured).


LONG_BYTES: Final = 1 << 20  # a shorter string is parsed with the rest
PIECE_BYTES: Final = 1 << 20  # examined at once
BASE64: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/="
BLANKS: Final = b" \t\r\n"

Span = tuple[int, int]  # where a run begins and ends


def loads(body: bytes) -> Any:
    """Return what `orjson.loads` returns. Raises orjson.JSONDecodeError."""
    spans = [*_long_runs(body)]
    if not spans:
        return orjson.loads(body)
    mark, kept, at = secrets.token_hex(16), [], 0
    for number, (start, end) in enumerate(spans):
        kept += [body[at:start], b"%s.%d." % (mark.encode(), number)]
        at = end
    doc = orjson.loads(b"".join([*kept, body[at:]]))
    _put_back(doc, mark, body, spans)
    return doc


def count_of(body: bytes, *marks: bytes) -> int:
    """Return how often these single bytes occur in the body."""
    pieces = range(0, len(body), PIECE_BYTES)
    return sum(body.count(mark, at, at + PIECE_BYTES) for mark in marks for at in pieces)


def inserted(body: bytes, at: int, added: bytes) -> bytes:
    """Return `body` with `added` before its byte `at`."""
    whole, old = BytesIO(), memoryview(body)
    for part in (old[:at], memoryview(added), old[at:]):
        for start in range(0, len(part), PIECE_BYTES):
            whole.write(part[start : start + PIECE_BYTES])
    return whole.getvalue()


def _long_runs(body: bytes) -> Iterator[Span]:
    """Yield the long runs of base64 that end a string which is a value, in order."""
    at = 0
    while at + PIECE_BYTES <= len(body):
        if not _is_base64(body, at, at + PIECE_BYTES):
            at += PIECE_BYTES
            continue
        if (end := body.find(b'"', at)) < 0:
            return
        start = _start(body, at)
        plain = start > 0 and body[start - 1 : start] != b"\\"  # its first letter is not that of an escape
        if plain and end - start >= LONG_BYTES:
            is_key = body[end + 1 : end + PIECE_BYTES].lstrip(BLANKS).startswith(b":")
            if not is_key and _is_base64(body, start, end):
                yield start, end
        at = end + 1


def _is_base64(body: bytes, start: int, end: int) -> bool:
    pieces = range(start, end, PIECE_BYTES)
    return not any(body[at : min(at + PIECE_BYTES, end)].translate(None, BASE64) for at in pieces)


def _start(body: bytes, at: int) -> int:
    """Return where the run begins that goes on at `at`."""
    while at > 0:
        before = max(0, at - PIECE_BYTES)
        if rest := body[before:at].translate(None, BASE64):
            return before + body[before:at].rindex(rest[-1:]) + 1
        at = before
    return 0


def _put_back(doc: Any, mark: str, body: bytes, spans: list[Span]) -> None:
    """Put the runs back into the strings that have their marks, wherever these are."""
    inner = [doc]
    while inner:
        outer = inner.pop()
        for key, value in outer.items() if isinstance(outer, dict) else enumerate(outer):
            if isinstance(value, str) and mark in value:
                before, _, rest = value.partition(mark)
                start, end = spans[int(rest.split(".")[1])]
                outer[key] = before + str(memoryview(body)[start:end], "ascii")
            elif isinstance(value, dict | list):
                inner.append(value)


def longest_string(doc: Any) -> int:
    """Return the characters of the longest string in a document, keys included."""
    longest, inner = 0, [doc]
    while inner:
        outer = inner.pop()
        if isinstance(outer, str):
            longest = max(longest, len(outer))
        elif isinstance(outer, dict):
            inner += [*outer, *outer.values()]
        elif isinstance(outer, list):
            inner += outer
    return longest
