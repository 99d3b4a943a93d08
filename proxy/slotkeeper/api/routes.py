"""Which of llama-server's routes a request is for, and what that lets us do with it (engine.md 1.1, 1.2)."""

from __future__ import annotations

from enum import StrEnum
from typing import Final
from urllib.parse import unquote

from slotkeeper.api.document import Doc, integer


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
    the engine decodes a path before it looks it up. It decodes more than we do; see `claim.plain`.
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


# How each API names the most tokens that an answer may have.
CAPS: Final[dict[Api, tuple[str, ...]]] = {
    Api.CHAT: ("max_tokens", "max_completion_tokens", "n_predict"),
    Api.COMPLETIONS: ("max_tokens", "n_predict"),
    Api.COMPLETION: ("n_predict", "max_tokens"),
    Api.INFILL: ("n_predict", "max_tokens"),
    Api.RESPONSES: ("max_output_tokens", "n_predict"),
    Api.MESSAGES: ("max_tokens",),
}


def answer_cap(api: Api, doc: Doc) -> int | None:
    """The most tokens that an answer may have, as its client says; None (-1, null): no limit."""
    caps = (integer(doc.get(name)) for name in CAPS.get(api, ()))
    return min((cap for cap in caps if cap is not None and cap >= 0), default=None)


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
