"""Requests for the comparison: every route, every API, well-formed and not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from slotkeeper.api.head import classify, takes_form
from slotkeeper.exchange.data import TAKES_SLOT

JSON: Final = {"Content-Type": "application/json"}
ORIGIN: Final = {"Origin": "http://app.example"}
PREFLIGHT: Final = {
    **ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}
USER: Final = [{"role": "user", "content": "Tell me of \u00fcber-whales \u2603."}]
FEW: Final = {"max_tokens": 12, "temperature": 0}
TOOLS: Final = [
    {"type": "function", "function": {"name": "ls", "parameters": {"type": "object", "properties": {}}}}
]
GET: Final = [
    "/health",
    "/v1/health",
    "/props",
    "/models",
    "/v1/models",
    "/slots",
    "/lora-adapters",
    "/metrics",
    "/v1/stream",
    "/tools",
    "/cors-proxy",
    "/",
    "/index.html",
    "/nothing",
    "/v1/nothing",
    "/v1/chat/completions",
    "/v1/chat/completions/",
    "//health",
    "/%68ealth",
    "/health?x=%2f%2F+y&x=1",
    "/slots?fail_on_no_slot=1",
    "/props?model=x",
    "/a%20b/%e2%98%83",
    "/health#part",
    "/..%2fetc",
    "/slots/0?action=save",
    "/api/tags",
    "/v1/models/nothing",
]
POST: Final = [
    "/health",
    "/props",
    "/models",
    "/v1/models",
    "/slots",
    "/lora-adapters",
    "/nothing",
    "/slots/x?action=save",
    "/slots/0",
    "/tools",
    "/slots/0?action=dance",
    "/embedding",
    "/embeddings",
    "/v1/embeddings",
    "/rerank",
    "/reranking",
    "/v1/rerank",
    "/v1/reranking",
    "/audio/transcriptions",
    "/v1/audio/transcriptions",
    "/v1/streams/lookup",
    "/v1/chat/completions/control",
    "/infill",
    "/v1/chat/completions/",
    "/apply-template",
    "/tokenize",
    "/detokenize",
]
GENERATE: Final = [
    "/completion",
    "/completions",
    "/v1/completions",
    "/chat/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/responses",
    "/v1/messages",
    "/infill",
]
COUNT: Final = [
    "/v1/messages/count_tokens",
    "/v1/chat/completions/input_tokens",
    "/chat/completions/input_tokens",
    "/v1/responses/input_tokens",
    "/responses/input_tokens",
]
# The sidecar itself refuses bodies that are no JSON object: tests/engine/test_bodies.py.
SPOILED: Final = {
    "no fields": b"{}",
    "wrong types": b'{"messages": 7, "prompt": {"a": 1}, "input": 3.5}',
    "wrong elements": b'{"messages": [1, "x"], "prompt": [[], {}], "input": [null]}',
    "bad tokens": b'{"prompt": [1, 99999999], "messages": [{"role": 5}], "input": [{}]}',
    "no prompt": b'{"prompt": [], "messages": [], "input": []}',
    "bad number": b'{"prompt": "x", "messages": [], "input": "", "temperature": "hot"}',
}


@dataclass(frozen=True, slots=True)
class Case:
    """One request. `cold`: the slots are emptied before it, so that both engines compute all of it."""

    name: str
    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    cold: bool = False


def plain() -> Iterator[Case]:
    """Return requests for routes that take no prompt, known and unknown, well-formed and not."""
    for path in GET:
        # Bodies that can be read in several ways go only to routes that change nothing: api/request.py.
        plain = "//" not in path and "/." not in path
        for method in ("GET", "HEAD", "DELETE", "PUT") if plain else ("GET", "HEAD"):
            yield Case(f"{method} {path}", method, path, ORIGIN if method == "GET" else {})
    for path in ("/health", "/v1/chat/completions", "/slots/0?action=save", "/nothing"):
        yield Case(f"preflight {path}", "OPTIONS", path, PREFLIGHT)
        yield Case(f"OPTIONS {path}", "OPTIONS", path)
    for path in (*POST, *COUNT):
        if classify("POST", path) not in TAKES_SLOT or takes_form(path):  # these routes read JSON only
            yield Case(f"POST {path} nothing", "POST", path)
        yield Case(f"POST {path} object", "POST", path, JSON, b"{}")
    for path in ("/v1/embeddings", "/embedding"):
        yield Case(path, "POST", path, JSON, b'{"input": "x", "content": "x"}')


def text() -> Iterator[Case]:
    """Return requests for templates, tokens, counts."""
    bodies: dict[str, dict[str, Any]] = {
        "/tokenize": {"content": "a \u2603 b", "add_special": True, "with_pieces": True},
        "/detokenize": {"tokens": [5, 6, 7]},
        "/apply-template": {"messages": USER, "tools": TOOLS},
        **{path: {"messages": USER, "input": "Hello", "system": "Be brief."} for path in COUNT},
    }
    for path, body in bodies.items():
        yield Case(path, "POST", path, {**JSON, **ORIGIN}, orjson.dumps(body))
        yield Case(f"{path} twice encoded", "POST", path.replace("e", "%65", 1), JSON, orjson.dumps(body))


def generated() -> Iterator[Case]:
    """Return requests for answers of every API, whole and streamed."""
    for path in GENERATE:
        for stream in (False, True):
            for name, more in _variants(path):
                if stream and name in ("several", "two"):
                    continue  # prompts run in parallel: their events come in any order
                body = {**_ask(path), "stream": stream, **more}
                yield Case(f"{path} {name} {stream=}", "POST", path, JSON, orjson.dumps(body), cold=True)
    for path in GENERATE:
        written = orjson.dumps({**_ask(path), "stream": True}, option=orjson.OPT_INDENT_2)
        escaped = path.replace("o", "%6f", 1) + "?a=b%20c"
        yield Case(f"{path} indented", "POST", escaped, {**JSON, **ORIGIN}, b"\n " + written, cold=True)


def refused() -> Iterator[Case]:
    """Return requests that cannot be answered, for the engine's error."""
    for path in GENERATE:
        for name, spoiled in SPOILED.items():
            # the engine answers some all the same: briefly, and always alike
            body = spoiled.replace(b'{"', b'{"max_tokens": 3, "temperature": 0, "', 1)
            yield Case(f"{path} {name}", "POST", path, JSON, body, cold=True)
        for stream in (False, True):
            long = {**_ask(path, "word " * 3000), "stream": stream}
            yield Case(f"{path} too long {stream=}", "POST", path, JSON, orjson.dumps(long), cold=True)
        yield Case(f"{path} no type", "POST", path, {}, orjson.dumps(_ask(path)), cold=True)


def actions() -> Iterator[Case]:
    """Return requests that fill, save, empty and restore a slot."""
    fill = orjson.dumps({**_ask("/completion"), "id_slot": 1})
    yield Case("fill", "POST", "/completion", JSON, fill)
    names = (("save", "x.bin"), ("save", "../y"), ("save", ""), ("restore", "none.bin"), ("erase", ""))
    for action, name in (*names, ("restore", "x.bin")):
        body = orjson.dumps({"filename": name} if name else {})
        yield Case(f"{action} {name}", "POST", f"/slots/1?action={action}", JSON, body)
    yield Case("again", "POST", "/completion", JSON, fill)


def locked() -> Iterator[Case]:
    """Return requests to an engine with --api-key: accepted, refused, public routes."""
    keys: tuple[dict[str, str], ...]
    keys = ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer k"}, {"X-Api-Key": "k"})
    for number, key in enumerate((*keys, {"X-Api-Key": "wrong"}, {"Authorization": "k"})):
        # Not /slots: it shows which slot a task took, and that is the sidecar's choice.
        for path in ("/health", "/v1/health", "/v1/models", "/props", "/lora-adapters", "/nothing"):
            yield Case(f"key {number} {path}", "GET", path, key)
        for path in ("/v1/chat/completions", "/v1/messages", "/tokenize"):
            body = orjson.dumps({**_ask(path), "content": "x"})
            yield Case(f"key {number} {path}", "POST", path, {**JSON, **key}, body, cold=True)
        yield Case(f"key {number} preflight", "OPTIONS", "/v1/chat/completions", {**PREFLIGHT, **key})


def _ask(path: str, text: str = "Tell me of \u00fcber-whales \u2603.") -> dict[str, Any]:
    user = [{"role": "user", "content": text}]
    if path.endswith("responses"):
        return {"input": text, "max_output_tokens": 12, "temperature": 0}
    if path == "/infill":
        return {"input_prefix": text, "input_suffix": " end", "n_predict": 12, "temperature": 0}
    return {**FEW, **({"messages": user} if "chat" in path or "messages" in path else {"prompt": text})}


def _variants(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "plain", {}
    yield "other model", {"model": "nobody"}
    if "chat" in path:
        yield "usage", {"stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2}
        yield "tools", {"tools": TOOLS, "tool_choice": "required", "max_tokens": 40}
        yield "progress", {"return_progress": True}
        yield "two", {"n": 2}
    if path in ("/completion", "/v1/completions"):
        yield "ids", {"prompt": [5, 6, 7, 8]}
        yield "several", {"prompt": ["one", "two"]}
        yield "nothing", {"n_predict": 0}
        yield "fields", {"response_fields": ["content", "tokens_cached"]}
