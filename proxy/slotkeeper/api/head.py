"""The head of a request: its route and its headers.

Some clients use their API key as the name of their session, or as their own name. Whatever we store of a
request, in a log, the journal, a metric or a recording, holds none of its credentials, and nothing that looks
like another client's key.
"""

from __future__ import annotations

import re
from binascii import Error, a2b_base64
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Final, Self
from urllib.parse import parse_qsl, unquote

import orjson
from multidict import CIMultiDict, CIMultiDictProxy


class Api(StrEnum):
    """The kind of API that a route belongs to. Metrics use the value as a label; there are only these."""

    CHAT = "chat"
    COMPLETIONS = "completions"  # OpenAI's text completions
    COMPLETION = "completion"  # llama-server's own; it has two paths
    INFILL = "infill"
    RESPONSES = "responses"
    MESSAGES = "messages"  # Anthropic's
    TASK = "task"  # uses a slot that cannot be chosen
    CONTROL = "control"  # save, restore or erase a slot
    MODELS = "models"  # load or unload models of a router or of llama-swap
    OTHER = "other"

    @property
    def generates(self) -> bool:
        """Whether the engine prefills a prompt and generates an answer."""
        return self in _GENERATES

    @property
    def pinnable(self) -> bool:
        """Whether the engine reads `id_slot` on this route; on /v1/messages it drops the field (T5)."""
        return self.generates and self is not Api.MESSAGES


_GENERATES: Final = frozenset(
    {Api.CHAT, Api.COMPLETIONS, Api.COMPLETION, Api.INFILL, Api.RESPONSES, Api.MESSAGES},
)

_ROUTES: Final[dict[str, Api]] = {
    "/v1/chat/completions": Api.CHAT,
    "/chat/completions": Api.CHAT,
    "/v1/completions": Api.COMPLETIONS,
    # Unlike /v1/completions, this path answers in the native shape, on both builds.
    "/completions": Api.COMPLETION,
    "/completion": Api.COMPLETION,
    "/infill": Api.INFILL,
    "/v1/responses": Api.RESPONSES,
    "/responses": Api.RESPONSES,
    "/v1/messages": Api.MESSAGES,
    "/embedding": Api.TASK,
    "/embeddings": Api.TASK,
    "/v1/embeddings": Api.TASK,
    "/rerank": Api.TASK,
    "/reranking": Api.TASK,
    "/v1/rerank": Api.TASK,
    "/v1/reranking": Api.TASK,
    "/audio/transcriptions": Api.TASK,
    "/v1/audio/transcriptions": Api.TASK,
    "/v1/systemone": Api.TASK,  # newest build only
}


LOAD_MODEL: Final = "/models/load"  # of llama-server's router; the body names the model, as to unload one
UNLOAD_ALL: Final = frozenset({"/unload", "/api/models/unload"})  # of llama-swap
UNLOAD_ONE: Final = "/api/models/unload/"  # of llama-swap; the model's name follows
_OF_MODELS: Final = frozenset(
    {
        *(("GET", "/unload"), ("HEAD", "/unload"), ("POST", "/api/models/unload")),
        *(("POST", LOAD_MODEL), ("POST", "/models/unload")),
    }
)


def classify(method: str, path: str) -> Api:
    """Return the API of `path` (without its query).

    For the engine a path with a trailing slash is another route (404), so it is OTHER here. Percent escapes
    make no difference: the engine decodes a path before it looks it up. The engine decodes more than we do;
    see `request.plain`.
    """
    if "%" in path:
        path = unquote(path)
    if (method, path) in _OF_MODELS or (method == "POST" and path.startswith(UNLOAD_ONE)):
        return Api.MODELS
    if method != "POST":
        return Api.OTHER
    head, _, slot = path.rpartition("/")
    if head == "/slots" and "/" not in slot:
        return Api.CONTROL
    return _ROUTES.get(path, Api.OTHER)


OPEN: Final = frozenset({"/health", "/v1/health"})
_OF_CLIENTS: Final = frozenset(
    {
        *(("GET", path) for path in ("/v1/models", "/models", "/api/tags", "/props")),
        *(("POST", path) for path in ("/tokenize", "/detokenize", "/apply-template", "/api/show")),
        ("POST", "/v1/messages/count_tokens"),
        *(
            ("POST", f"{v1}/{api}/input_tokens")
            for v1 in ("", "/v1")
            for api in ("chat/completions", "responses")
        ),
    }
)


# By these a client sees or changes what the engine does for others, or has it call servers and run tools.
_SHARED: Final = frozenset(
    {
        *(("GET", path) for path in ("/slots", "/tools", "/cors-proxy", "/models/sse")),
        *(("POST", path) for path in ("/props", "/lora-adapters", "/tools", "/cors-proxy")),
        ("POST", "/v1/chat/completions/control"),
    }
)


def is_shared(method: str, path: str) -> bool:
    """Whether one client of the engine could see, slow or cut another by this route, whatever its body says.

    Slot actions, models, and resumable streams have their own checks.
    """
    return ("GET" if method == "HEAD" else method, unquote(path)) in _SHARED


def is_open(method: str, path: str) -> bool:
    """Whether the route needs no key: it shows no private data, and the engine asks for no key either."""
    return method == "OPTIONS" or (method in {"GET", "HEAD"} and path in OPEN)


def is_for_clients(api: Api, method: str, path: str) -> bool:
    """Whether the route is for clients: it shows and changes nothing of other clients.

    All other routes are for operators: slots, metrics, adapters, the web UI, resumed streams. Paths are not
    decoded, so a path with escapes is for operators too.
    """
    if api in {Api.OTHER, Api.CONTROL, Api.MODELS}:
        return ("GET" if method == "HEAD" else method, path) in _OF_CLIENTS
    return True


def takes_form(path: str) -> bool:
    """Whether this `Api.TASK` route reads a form with a file: its fields are text and name no slot."""
    return unquote(path).endswith("/audio/transcriptions")


# -- secrets of a request, which must not be stored ------------------------------------------------------

NAMES: Final = ("auth", "cookie", "key", "secret", "token", "password")  # found in names of credentials
LEAST: Final = 12  # characters; a shorter secret may be part of any word, so only whole words are compared
LONGEST: Final = 64  # characters; whether a longer name is a credential's is not cached
MASK: Final = "***"
_SCALAR: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[^\s"{}\[\],:]++', re.DOTALL)  # string or number in JSON
_ESCAPES: Final = (rb"\u", rb"\/")  # a character that orjson writes otherwise is written with one of these
# Keys of OpenAI, Anthropic, Hugging Face, GitHub, Slack; and signed tokens.
_KEY: Final = (
    r"\b(?:(?:sk|pk|hf|gh[oprsu]|github_pat|xox[a-z])[-_][\w-]{16,}"
    r"|(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
_SHAPED: Final = re.compile(_KEY, re.ASCII)
_SHAPED_BYTES: Final = re.compile(_KEY.encode())


@dataclass(frozen=True, slots=True)
class Secrets:
    """The credentials of one request."""

    words: frozenset[str]

    @classmethod
    def of(cls, headers: Mapping[str, str], query: str = "") -> Self:
        """Collect the values of the headers and query fields that are named like a credential."""
        found = [word for name, value in headers.items() if tells_secret(name) for word in _words(value)]
        if query and tells_secret(query):
            found += [value for name, value in parse_qsl(query) if tells_secret(name)]
        return cls(frozenset(found))

    def stand_in(self, text: str) -> bool:
        """Whether a text must not be stored: it contains a credential of this request, or any key."""
        whole = text.split()
        own = any(word in (text if len(word) >= LEAST else whole) for word in self.words)
        return own or _SHAPED.search(text) is not None

    def hidden(self, text: str) -> str:
        """Return a text as it may be logged: masked as a whole if it contains a credential."""
        return MASK if self.stand_in(text) else text

    def without(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Drop the headers that hold a secret although their names do not suggest one.

        Headers that are named like a credential stay: callers must not store them.
        """
        open_ = [(name, value) for name, value in headers.items() if not tells_secret(name)]
        if not self.stand_in("\n".join([value for _, value in open_])):  # one check for nearly all requests
            return headers
        left = CIMultiDict(headers)
        for name in {name for name, value in open_ if self.stand_in(value)}:
            left.popall(name)
        return left

    def masked(self, data: bytes) -> bytes:
        """Mask the request's own credentials in its body, except those shorter than LEAST, and every key.

        `data` is valid JSON and stays so: a credential is masked within a string, and a number becomes one.
        What looks like a key is in a string.
        """
        data = _SHAPED_BYTES.sub(MASK.encode(), data)
        words = [word.encode(errors="replace").decode() for word in self.words if len(word) >= LEAST]
        forms = [*(orjson.dumps(word)[1:-1] for word in words), *_ESCAPES]

        def mask(found: re.Match[bytes]) -> bytes:
            scalar = found[0]
            if not any(form in scalar for form in forms):
                return scalar
            whole: str = orjson.loads(scalar) if scalar.startswith(b'"') else scalar.decode()
            text = whole
            for word in words:
                text = text.replace(word, MASK)
            return scalar if text == whole else orjson.dumps(text)

        return _SCALAR.sub(mask, data) if words and any(form in data for form in forms) else data


def tells_secret(name: str) -> bool:
    """Whether a header or query field with this name holds a credential."""
    return _known(name) if len(name) <= LONGEST else _tells(name)


def _tells(name: str) -> bool:
    lower = name.lower()
    return any(part in lower for part in NAMES)


_known = lru_cache(maxsize=512)(_tells)  # called three times for each header of every request


def masked(text: str) -> str:
    """Mask everything in a text of unknown origin that looks like a key."""
    return _SHAPED.sub(MASK, text)


def _words(value: str) -> Iterator[str]:
    """Yield the secret parts of a header: without the scheme before a key and the names of cookies."""
    words = value.replace(";", " ").split()
    scheme = words.pop(0).lower() if len(words) > 1 and words[0].isalpha() else ""
    for word in words:
        name, _, cookie = word.rstrip("=").partition("=")
        value = (cookie or name).strip('",')  # as in session="..."
        if not cookie or len(value) >= LEAST:  # a short cookie is a preference
            yield value
    if scheme == "basic":
        yield from _password(words[0])


def _password(basic: str) -> Iterator[str]:
    try:
        password = a2b_base64(basic.encode(errors="replace")).decode(errors="replace").partition(":")[2]
    except Error:
        return
    if password:
        yield password


# -- headers: the ones that are forwarded, and our own ---------------------------------------------------

REQUEST_ID: Final = "X-Request-Id"
SLOT: Final = "X-Slotkeeper-Slot"
DECISION: Final = "X-Slotkeeper-Decision"
PREDICTED: Final = "X-Slotkeeper-Predicted"  # tokens that we expect the engine to reuse
PLANTED: Final = "X-Slotkeeper-Planted"  # tokens that our prefills computed just before, for this request
REWRITTEN: Final = "X-Slotkeeper-Rewritten"  # the rules that changed the request
CONVERSATION: Final = "X-Slotkeeper-Conversation"  # what the client, or our answer, calls it
BYPASS: Final = "X-Slotkeeper-Bypass"  # "1": forward unchanged and unpinned
PROGRESS: Final = "X-Slotkeeper-Progress"  # "1": comments each second while the request waits
PRIORITY: Final = "X-Slotkeeper-Priority"  # high, normal or low; our answer adds what was done about it
MAX_WAIT: Final = "X-Slotkeeper-Max-Wait"  # seconds in which the request must begin, else 503
STREAM_ID: Final = "X-Conversation-Id"  # llama-server's: the stream continues without its client
HOPS: Final = "X-Slotkeeper-Hops"  # the sidecars that forwarded the request, to detect a loop

AUTH: Final = ("Authorization", "X-Api-Key")  # the headers that llama-server reads, in its order

TRACE_PARENT: Final = "traceparent"  # W3C Trace Context

# RFC 9110 section 7.6.1, and proxy-connection, which is not in the RFC but which clients send.
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
    """Return the headers to forward, in order, with every value: all except hop-by-hop ones and `drop`."""
    pairs = list(headers)
    unwanted = HOP_BY_HOP | {name.lower() for name in drop}
    for name, value in pairs:
        if name.lower() == "connection":
            unwanted |= {token.strip().lower() for token in value.split(",")}
    return [(name, value) for name, value in pairs if name.lower() not in unwanted]


HOP_PREFIX: Final = "slotkeeper-hop-"  # begins the name of a sidecar in a Connection header


def hops(headers: CIMultiDict[str] | CIMultiDictProxy[str]) -> list[str]:
    """Return the sidecars that forwarded a request, in their order, from `HOPS` and Connection headers."""
    named = [part.strip() for value in headers.getall(HOPS, []) for part in value.split(",")]
    tokens = [part.strip() for value in headers.getall("Connection", []) for part in value.split(",")]
    named += [token.removeprefix(HOP_PREFIX) for token in tokens if token.startswith(HOP_PREFIX)]
    return list(filter(None, named))


def request_id(value: str | None, fresh: Callable[[], str]) -> str:
    """Return the client's own request id if it is safe in a log and a header, else a fresh one."""
    return value if value is not None and _SAFE_ID.fullmatch(value) else fresh()
