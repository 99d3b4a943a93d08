"""Our errors, in three families, and how each API writes them."""

from __future__ import annotations

from typing import Any, Final

import orjson

from slotkeeper.api.document import Doc, table
from slotkeeper.api.head import Api

TEXT_LIMIT: Final = 2000  # characters of an error page that a message quotes

# llama-server's names (engine.md 7). It has none for 429, so the name is OpenAI's.
_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_supported_error",
    502: "unavailable_error",
    503: "unavailable_error",
    504: "unavailable_error",
}

_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class Fault(Exception):  # noqa: N818 (a family, not one error)
    """A request failed and gets an error answer. Raise one of the subclasses, not this class."""

    default_status = 500

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        type: str | None = None,  # noqa: A002 (its name in every API)
        retry_after: int | None = None,
        more: dict[str, Any] | None = None,
        quotes: bool = False,  # the words are the engine's, which may quote a prompt or a key
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = self.default_status if status is None else status
        fallback = "invalid_request_error" if self.status < 500 else "server_error"
        self.type = type or _TYPES.get(self.status, fallback)
        self.retry_after = retry_after  # seconds
        self.more = more or {}  # further fields of the engine's own error
        self.loggable = f"the engine answered {self.status}" if quotes else message

    def __repr__(self) -> str:
        return f"<{self.__class__.__name__} {self.status} {self.type}: {self.message}>"


class ClientFault(Fault):
    """The client's request is wrong: 4xx."""

    default_status = 400


class UpstreamFault(Fault):
    """The engine is gone, broken, loading or too slow: 502, 503, 504."""

    default_status = 502


class OurFault(Fault):
    """The sidecar itself failed: 500."""


def too_long(api: Api, tokens: int, context: int) -> ClientFault:
    """Return llama-server's error for a prompt of at least so many `tokens`, which exceed the context.

    Agents compact their conversation when they read it. For Anthropic's API it begins as Anthropic's does.
    """
    said = f"request (at least {tokens} tokens) exceeds the available context size ({context} tokens)"
    if api is Api.MESSAGES:
        said = f"prompt is too long: {tokens} tokens > {context} maximum; {said}"
    more = {"n_prompt_tokens": tokens, "n_ctx": context}
    return ClientFault(f"{said}, try increasing it", type="exceed_context_size_error", more=more)


def retold(status: int, body: bytes) -> Fault:
    """Convert the engine's error answer to a fault with the same content, to send it as a stream event.

    Its words go only to the client of the request: they are about it, as without Slotkeeper.
    """
    family = ClientFault if status < 500 else UpstreamFault
    error = _error_in(body)
    message, kind = error.pop("message", None), error.pop("type", None)
    return family(
        message if isinstance(message, str) else _text(body) or f"the engine answered {status}",
        status=status,
        type=kind if isinstance(kind, str) else None,
        more=error,
        quotes=True,
    )


def _error_in(body: bytes) -> Doc:
    try:
        return dict(table(orjson.loads(body), "error"))
    except (orjson.JSONDecodeError, AttributeError):  # no JSON, or no object
        return {}


def _text(body: bytes) -> str:
    """Return the start of a body that is not JSON; "" for an HTML page or compressed bytes."""
    try:
        text = body.decode()[:TEXT_LIMIT]
    except UnicodeDecodeError:
        return ""
    return "" if text.lstrip().startswith("<") else text


def body(fault: Fault, api: Api) -> bytes:
    """Return the JSON body of an error answer, in the shape that clients of this API read."""
    return orjson.dumps(_anthropic(fault) if api is Api.MESSAGES else {"error": _inner(fault)})


def sse(fault: Fault, api: Api) -> bytes:
    """Return the event that ends a stream after an error."""
    match api:
        case Api.MESSAGES:
            return _event("error", _anthropic(fault))
        case Api.RESPONSES:
            # One object serves both readers: the API's own event, and the `error` key that its SDKs raise on.
            inner = _inner(fault)
            return _event("error", {**inner, "type": "error", "sequence_number": 0, "error": inner})
        case _:
            return b"data: " + orjson.dumps({"error": _inner(fault)}) + b"\n\n"


def _event(name: str, value: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(value) + b"\n\n"


def _inner(fault: Fault) -> dict[str, Any]:
    return {"code": fault.status, "message": fault.message, "type": fault.type, "param": None, **fault.more}


def _anthropic(fault: Fault) -> dict[str, Any]:
    fallback = "invalid_request_error" if fault.status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(fault.status, fallback)
    return {"type": "error", "error": {"type": kind, "message": fault.message}}


def outcome_of(fault: Fault) -> str:
    """Return the outcome of a failed request, as metrics and logs name it."""
    if isinstance(fault, UpstreamFault):
        return "upstream_error"
    return "client_error" if isinstance(fault, ClientFault) else "broken"


def outcome_by(status: int) -> str:
    """Return the outcome of a request to which the engine gave an answer of this status."""
    return "ok" if status < 400 else "client_error" if status < 500 else "upstream_error"
