"""The head of a request: its route and its headers.

Some clients call their session, or themselves, by their key. What is written down of a request, in a log, in
the journal, in a metric or in a recording, holds none of its own credentials, and nothing that looks like a
key of another client.
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

from multidict import CIMultiDict


class Api(StrEnum):
    """What a route means to us. The value is the bounded label of metrics."""

    CHAT = "chat"
    COMPLETIONS = "completions"  # OpenAI's text completions
    COMPLETION = "completion"  # llama-server's own, which has two paths
    INFILL = "infill"
    RESPONSES = "responses"
    MESSAGES = "messages"  # Anthropic's
    TASK = "task"  # takes a slot that cannot be chosen
    CONTROL = "control"  # save, restore or erase a slot
    OTHER = "other"

    @property
    def generates(self) -> bool:
        """Whether an answer is generated, so that a prompt is prefilled."""
        return self in _GENERATES

    @property
    def pinnable(self) -> bool:
        """Whether the engine reads `id_slot` here; on /v1/messages it drops it (T5)."""
        return self.generates and self is not Api.MESSAGES


_GENERATES: Final = frozenset(
    {Api.CHAT, Api.COMPLETIONS, Api.COMPLETION, Api.INFILL, Api.RESPONSES, Api.MESSAGES},
)

_ROUTES: Final[dict[str, Api]] = {
    "/v1/chat/completions": Api.CHAT,
    "/chat/completions": Api.CHAT,
    "/v1/completions": Api.COMPLETIONS,
    # Unlike /v1/completions this one answers in the native shape, on both builds.
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


def classify(method: str, path: str, prefix: str = "") -> Api:
    """The meaning of `path` (without its query); `prefix` is the engine's --api-prefix.

    A trailing slash is another route to the engine (404), so it is to us. Percent escapes are not:
    the engine decodes a path before it looks it up. It decodes more than we do; see `request.plain`.
    """
    if method != "POST":
        return Api.OTHER
    if "%" in path:
        path = unquote(path)
    if not path.startswith(prefix):
        return Api.OTHER
    path = path[len(prefix) :]
    head, _, slot = path.rpartition("/")
    if head == "/slots" and "/" not in slot:
        return Api.CONTROL
    return _ROUTES.get(path, Api.OTHER)


OPEN: Final = frozenset({"/health", "/v1/health"})
_OF_CLIENTS: Final = frozenset(
    {
        *(("GET", path) for path in ("/v1/models", "/models", "/api/tags", "/props")),
        *(("POST", path) for path in ("/tokenize", "/detokenize", "/apply-template", "/api/show")),
        *(("POST", path) for path in ("/v1/messages/count_tokens", "/v1/responses/input_tokens")),
        *(("POST", f"{v1}/chat/completions/input_tokens") for v1 in ("", "/v1")),
    }
)


def is_open(method: str, path: str, prefix: str = "") -> bool:
    """Whether the engine, too, answers this without a key: it has no private data."""
    return method == "OPTIONS" or (method in {"GET", "HEAD"} and path.removeprefix(prefix) in OPEN)


def is_for_clients(api: Api, method: str, path: str, prefix: str = "") -> bool:
    """Whether this shows and changes nothing but the client's own.

    What is not known here is for operators: slots, metrics, adapters, the web UI, resumed streams. Paths
    are not decoded: one with escapes in it is for operators too.
    """
    if api in {Api.OTHER, Api.CONTROL}:
        return ("GET" if method == "HEAD" else method, path.removeprefix(prefix)) in _OF_CLIENTS
    return True


def takes_form(path: str) -> bool:
    """Whether this route of `Api.TASK` reads a form with a file: its fields are text, which names no slot."""
    return unquote(path).endswith("/audio/transcriptions")


# -- what of a request must not be written down ----------------------------------------------------------

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
CONVERSATION: Final = "X-Slotkeeper-Conversation"  # a client's hint
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
