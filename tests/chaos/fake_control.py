"""The fake engine's control routes: a tokenizer with a token for every byte, a template, and slots."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

import orjson

from slotkeeper.api.document import rows


@dataclass(slots=True)
class FakeControl:
    """The answers of GET /props, GET /slots and the text routes."""

    slots: list[int | None]  # the task in each slot
    held: list[int]  # tokens in each slot
    marker: str = field(default_factory=lambda: uuid.uuid4().hex)  # changes with every start

    extra: dict[str, Any] = field(default_factory=dict)  # more routes

    def answer(self, path: str, body: bytes) -> Any:
        """Return a JSON document, or None if there is no such route."""
        doc = loads(body)
        match path:
            case "/health":
                return {"status": "ok"}
            case "/props":
                context = {"n_ctx": 65536}
                known = {"total_slots": len(self.slots), "media_marker": self.marker, "eos_token": "<e>"}
                return {**known, "default_generation_settings": context, "build_info": "b11549-fake"}
            case "/v1/models":
                return {"data": [{"id": "fake", "architecture": {}}]}
            case "/slots":
                return [
                    {"id": slot, "is_processing": task is not None, "id_task": task, "n_prompt_tokens": held}
                    for slot, (task, held) in enumerate(zip(self.slots, self.held, strict=True))
                ]
            case "/apply-template":
                return {"prompt": _rendered(doc)}
            case "/tokenize":
                return {"tokens": _ids(doc.get("content"))}
        return self.extra.get(path)

    def prompt_tokens(self, body: bytes) -> int:
        """Return the number of tokens in the prompt of a generating request."""
        doc = loads(body)
        return len(_ids(doc["prompt"])) if "prompt" in doc else len(_rendered(doc))


def loads(body: bytes) -> dict[str, Any]:
    """Return the object in `body`, or an empty one."""
    try:
        doc = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return doc if isinstance(doc, dict) else {}


def error(status: int) -> dict[str, Any]:
    return {"error": {"code": status, "message": "so the script says", "type": "unavailable_error"}}


def _rendered(doc: dict[str, Any]) -> str:
    messages = doc.get("messages") or [{"role": "user", "content": doc.get("input")}]
    return "".join(f"<{m.get('role')}>{m.get('content')}<e>" for m in rows(messages))


def _ids(content: Any) -> list[int]:
    if isinstance(content, str):
        return list(content.encode())
    listed = content if isinstance(content, list) else []
    if set(map(type, listed)) == {int}:  # checked in one step, since a plant may have a million tokens
        return listed
    parts = ([part] if isinstance(part, int) else _ids(part) for part in listed)
    return [number for part in parts for number in part]
