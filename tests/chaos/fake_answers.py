"""The fake engine's answers in each API's shape: a whole body, a whole stream, and a check of either."""

from __future__ import annotations

from typing import Any, Final

import orjson

from slotkeeper.api.head import Api

PATHS: Final = {
    Api.CHAT: "/v1/chat/completions",
    Api.COMPLETIONS: "/v1/completions",
    Api.COMPLETION: "/completion",
    Api.RESPONSES: "/v1/responses",
    Api.MESSAGES: "/v1/messages",
}
WORDS: Final = ("one", " two", " three", " four")
END: Final = {
    Api.CHAT: b"data: [DONE]\n\n",
    Api.COMPLETIONS: b"data: [DONE]\n\n",
    Api.COMPLETION: b'"stop":true',
    Api.RESPONSES: b"event: response.completed\n",
    Api.MESSAGES: b"event: message_stop\n",
}


def request_body(api: Api, *, stream: bool, text: str = "Count to four.", **more: Any) -> dict[str, Any]:
    """Return the smallest body that a client sends."""
    body: dict[str, Any] = {"stream": stream, "max_tokens": 8, **more}
    match api:
        case Api.COMPLETION | Api.COMPLETIONS:
            body["prompt"] = text
        case Api.RESPONSES:
            body["input"] = text
        case _:
            body["messages"] = [{"role": "user", "content": text}]
    return body


def answer_body(api: Api, prompt_tokens: int, slot: int) -> bytes:
    text, generated = "".join(WORDS), len(WORDS)
    timings = {"cache_n": 0, "prompt_n": prompt_tokens, "predicted_n": generated}
    match api:
        case Api.COMPLETION | Api.INFILL:
            native = {"content": text, "id_slot": slot, "stop": True, "tokens_evaluated": prompt_tokens}
            return orjson.dumps({**native, "tokens_predicted": generated, "timings": timings})
        case Api.MESSAGES:
            usage = {"cache_read_input_tokens": 0, "input_tokens": prompt_tokens, "output_tokens": generated}
            content = [{"type": "text", "text": text}]
            return orjson.dumps({"type": "message", "role": "assistant", "content": content, "usage": usage})
        case Api.RESPONSES:
            return orjson.dumps(_response(text, prompt_tokens))
        case _:
            usage = {"prompt_tokens": prompt_tokens, "completion_tokens": generated}
            choice = {"index": 0, "text": text, "message": {"role": "assistant", "content": text}}
            return orjson.dumps({"choices": [choice], "usage": usage, "timings": timings})


def answer_events(api: Api, prompt_tokens: int, slot: int) -> list[bytes]:
    """Return the events of a whole stream, in order."""
    timings = {"cache_n": 0, "prompt_n": prompt_tokens, "predicted_n": len(WORDS)}
    match api:
        case Api.COMPLETION | Api.INFILL:
            said = [_data({"content": word, "id_slot": -1, "stop": False}) for word in WORDS]
            last = {"content": "", "id_slot": slot, "stop": True, "tokens_evaluated": prompt_tokens}
            return [*said, _data({**last, "tokens_predicted": len(WORDS), "timings": timings})]
        case Api.MESSAGES:
            usage = {"cache_read_input_tokens": 0, "input_tokens": prompt_tokens}
            said = [_event("content_block_delta", index=0, delta=_text_delta(word)) for word in WORDS]
            return [
                _event("message_start", message={"role": "assistant", "usage": usage}),
                *said,
                _event("message_delta", delta={}, usage={"output_tokens": len(WORDS)}),
                _event("message_stop"),
            ]
        case Api.RESPONSES:
            said = [_event("response.output_text.delta", delta=word) for word in WORDS]
            whole = _response("".join(WORDS), prompt_tokens)
            return [_event("response.created"), *said, _event("response.completed", response=whole)]
        case _:
            said = [_data({"choices": [_choice(word)]}) for word in WORDS]
            return [*said, _data({"choices": [_choice("")], "timings": timings}), b"data: [DONE]\n\n"]


def looks_whole(api: Api, stream: bytes) -> bool:
    """Whether a client would take these bytes for a complete, correct answer."""
    return END[api] in stream and b'"error"' not in stream


def _choice(word: str) -> dict[str, Any]:
    return {"index": 0, "text": word, "delta": {"content": word}}


def _text_delta(word: str) -> dict[str, str]:
    return {"type": "text_delta", "text": word}


def _response(text: str, prompt_tokens: int) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text}]
    usage = {"input_tokens": prompt_tokens, "output_tokens": len(WORDS)}
    return {
        "status": "completed",
        "output": [{"type": "message", "role": "assistant", "content": content}],
        "usage": {**usage, "input_tokens_details": {"cached_tokens": 0}},
    }


def _data(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def _event(name: str, **fields: Any) -> bytes:
    return b"event: " + name.encode() + b"\n" + _data({"type": name, **fields})
