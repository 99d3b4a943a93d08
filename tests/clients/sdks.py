"""Use one library as its users do, against the server at a URL, and print what they get, as JSON.

`python sdks.py NAME URL` runs in the virtual environment of the clients (requirements/clients.lock), so it
imports nothing of Slotkeeper, and each library only where it is
used: they take seconds. A result is a value that two servers should both give, or the error's type.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

Results = dict[str, Any]

TASK: Final = "Name three rivers and say why they matter."
SYSTEM: Final = "You are a careful assistant. Answer in whole sentences. " * 8
ASK: Final = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]
SCHEMA: Final = {"type": "object", "properties": {"deep": {"type": "boolean"}}, "required": ["deep"]}
TOOL: Final = {"name": "measure", "description": "Measure a river.", "parameters": SCHEMA}
TOOLS: Final = [{"type": "function", "function": TOOL}]
TOO_LONG: Final = "river " * 70_000  # more tokens than a slot has
ANSWER_TOKENS: Final = 1000  # the tiny models end their answers sooner
CHUNKS_READ: Final = 3  # before a stream is cancelled
ENDLESS: Final = {"ignore_eos": True, "max_tokens": 60_000}
PROGRESS_SECONDS: Final = 1.0  # between two comments for a client that asks for them
RETRIES: Final = 30  # the last of them wait for eight seconds each


def got(call: Callable[[], Any]) -> Any:
    """Return the result, or the error as its user sees it."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - whatever the library raises is the result
        status = getattr(error, "status_code", None)
        return {"error": type(error).__name__, "status": status}


def started(chunks: Iterable[Any]) -> int:
    """Return the number of chunks read before the reader stops."""
    return sum(1 for _ in zip(range(CHUNKS_READ), chunks, strict=False))


def _openai(base: str) -> Results:
    import httpx
    import openai

    client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
    create: Any = client.chat.completions.create
    common: dict[str, Any] = {"model": "local", "max_tokens": ANSWER_TOKENS, "temperature": 0}

    def chat() -> Any:
        answer = create(messages=ASK, **common)
        choice = answer.choices[0]
        return [choice.message.content, choice.finish_reason, answer.usage.prompt_tokens]

    def stream() -> Any:
        chunks = list(create(messages=ASK, stream=True, stream_options={"include_usage": True}, **common))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        return [text, chunks[-1].usage.prompt_tokens, chunks[-2].choices[0].finish_reason]

    def tools() -> Any:
        message = create(messages=ASK, tools=TOOLS, tool_choice="required", **common).choices[0].message
        call = message.tool_calls[0]
        result = {"role": "tool", "tool_call_id": call.id, "content": "It is deep."}
        told = [*ASK, message.model_dump(exclude_none=True), result]
        after = create(messages=told, tools=TOOLS, **common)
        return [call.function.name, call.function.arguments, after.choices[0].message.content]

    def streamed_tools() -> Any:
        chunks = list(create(messages=ASK, tools=TOOLS, tool_choice="required", stream=True, **common))
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        return [calls[0].function.name, "".join(call.function.arguments or "" for call in calls)]

    def cancelled() -> Any:
        with create(messages=ASK, stream=True, **common) as chunks:
            read = started(chunks)
        return [read, chat()]

    def responses() -> Any:
        ask: Any = {"model": "local", "input": ASK, "max_output_tokens": ANSWER_TOKENS, "temperature": 0}
        whole: Any = client.responses.create(**ask)
        events = [event.type for event in client.responses.create(stream=True, **ask)]
        return [whole.output_text, whole.status, sorted(set(events)), events[-1]]

    def completion() -> Any:
        return client.completions.create(prompt=TASK, **common).choices[0].text

    def told(content: Any) -> Callable[[], Any]:
        return lambda: create(messages=[{"role": "user", "content": content}], **common).choices[0].message

    return {
        "models": got(lambda: len(list(client.models.list()))),
        "chat": got(chat),
        "stream": got(stream),
        "tools": got(tools),
        "streamed tools": got(streamed_tools),
        "cancelled": got(cancelled),
        "responses": got(responses),
        "completion": got(completion),
        "no such role": got(lambda: create(messages=[{"role": 3}], **common)),
        "malformed content": got(told([{"type": "no such type"}])),
        "too long": got(told(TOO_LONG)),
        "no embeddings": got(lambda: client.embeddings.create(model="local", input="a")),
        "no such path": got(lambda: client.get("/no-such-path", cast_to=httpx.Response)),
    }


def _anthropic(base: str) -> Results:
    import anthropic

    client = anthropic.Anthropic(base_url=base, api_key="none", max_retries=0)
    tools: Any = [{"name": "measure", "description": "Measure a river.", "input_schema": SCHEMA}]
    user: Any = {"role": "user", "content": TASK}
    common: dict[str, Any] = {"model": "local", "max_tokens": ANSWER_TOKENS, "system": SYSTEM}
    create: Any = client.messages.create

    def chat() -> Any:
        answer = create(messages=[user], **common)
        return [[block.type for block in answer.content], answer.stop_reason, answer.usage.output_tokens]

    def stream() -> Any:
        with client.messages.stream(messages=[user], **common) as events:
            kinds = {event.type for event in events}
            last = events.get_final_message()
        return [sorted(kinds), last.stop_reason, [block.type for block in last.content]]

    def call() -> Any:
        wanted = {"tools": tools, "tool_choice": {"type": "any"}, **common}
        answer = create(messages=[user], **wanted)
        use = next(block for block in answer.content if block.type == "tool_use")
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "It is deep."}
        spoken = {"role": "assistant", "content": [block.model_dump() for block in answer.content]}
        after = create(messages=[user, spoken, {"role": "user", "content": [result]}], tools=tools, **common)
        return [use.name, use.input, after.stop_reason, after.usage.output_tokens]

    def cancelled() -> Any:
        with create(messages=[user], stream=True, **common) as events:
            read = started(events)
        return [read, chat()]

    def counted() -> Any:
        return client.messages.count_tokens(model="local", messages=[user], system=SYSTEM).input_tokens

    long: Any = {"role": "user", "content": TOO_LONG}
    return {
        "models": got(lambda: len(list(client.models.list()))),
        "chat": got(chat),
        "stream": got(stream),
        "tools": got(call),
        "cancelled": got(cancelled),
        "count": got(counted),
        "no such role": got(lambda: create(messages=[{"role": 3}], **common)),
        "too long": got(lambda: create(messages=[long], **common)),
        "no batches": got(lambda: list(client.messages.batches.list())),
    }


def _langchain(base: str) -> Results:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    url: Any = {"base_url": f"{base}/v1", "api_key": "none", "model": "local", "max_retries": 0}
    model = ChatOpenAI(**url, temperature=0, max_tokens=ANSWER_TOKENS)
    responses = ChatOpenAI(**url, temperature=0, use_responses_api=True)

    @tool
    def measure(deep: bool) -> str:
        """Measure a river."""
        return f"It is deep: {deep}."

    def tools() -> Any:
        calling = model.bind_tools([measure], tool_choice="required")
        said = calling.invoke(ASK)
        result = measure.invoke(said.tool_calls[0])
        return [said.tool_calls[0]["args"], model.bind_tools([measure]).invoke([*ASK, said, result]).content]

    def structured() -> Any:
        schema = {"title": "River", **SCHEMA}
        return model.with_structured_output(schema, method="json_schema").invoke(ASK)

    return {
        "chat": got(lambda: model.invoke(ASK).content),
        "stream": got(lambda: "".join(str(chunk.content) for chunk in model.stream(ASK))),
        "batch": got(lambda: len(model.batch([ASK, ASK, ASK]))),
        "tools": got(tools),
        "structured": got(structured),
        "responses": got(lambda: responses.invoke(ASK).content[0]["type"]),
        "cancelled": got(lambda: [started(model.stream(ASK)), model.invoke(ASK).content]),
        "too long": got(lambda: model.invoke(TOO_LONG)),
    }


def _litellm(base: str) -> Results:
    import litellm

    litellm.suppress_debug_info = True  # else it prints to stdout
    complete: Any = litellm.completion
    ways: dict[str, dict[str, Any]] = {
        "openai": {"model": "openai/local", "api_base": f"{base}/v1"},
        "anthropic": {"model": "anthropic/local", "api_base": base},
    }

    def uses(name: str) -> Results:
        common = {**ways[name], "api_key": "none", "max_tokens": ANSWER_TOKENS, "num_retries": 0}

        def streamed() -> Any:
            chunks = list(complete(messages=ASK, stream=True, **common))
            return [bool(chunks), chunks[-1].choices[0].finish_reason]

        def called() -> Any:
            answer = complete(messages=ASK, tools=TOOLS, tool_choice="required", **common)
            return answer.choices[0].message.tool_calls[0].function.name

        long = [{"role": "user", "content": TOO_LONG}]
        return {
            f"{name}: chat": got(lambda: complete(messages=ASK, **common).choices[0].finish_reason),
            f"{name}: stream": got(streamed),
            f"{name}: tools": got(called),
            f"{name}: too long": got(lambda: complete(messages=long, **common)),
        }

    return uses("openai") | uses("anthropic")


def _retried(base: str) -> Results:
    """Ask while the engine is down: the libraries try again until it is there."""
    import anthropic
    import openai

    print("asks now", file=sys.stderr, flush=True)  # noqa: T201 - the test starts the engine then
    of_openai: Any = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=RETRIES)
    of_anthropic: Any = anthropic.Anthropic(base_url=base, api_key="none", max_retries=RETRIES)
    common: dict[str, Any] = {"model": "local", "max_tokens": ANSWER_TOKENS, "messages": ASK[1:]}
    return {
        "openai": got(lambda: of_openai.chat.completions.create(**common).choices[0].finish_reason),
        "anthropic": got(lambda: of_anthropic.messages.create(**common).stop_reason),
    }


def _endless(base: str) -> Results:
    """Read an answer that does not end until the context is full."""
    import openai

    create: Any = openai.OpenAI(base_url=f"{base}/v1", api_key="none").chat.completions.create
    return {"chunks": len(list(create(model="local", messages=ASK, stream=True, extra_body=ENDLESS)))}


def _waits(base: str) -> Results:
    """Ask for progress behind a running answer, which ends once its reader has left."""
    import anthropic
    import openai

    of_openai: Any = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
    of_anthropic: Any = anthropic.Anthropic(base_url=base, api_key="none", max_retries=0)
    create: Any = of_openai.chat.completions.create
    header = {"X-Slotkeeper-Progress": "1"}

    def behind_another(ask: Callable[[Callable[[], None]], Any]) -> Any:
        first = create(model="local", messages=ASK, stream=True, extra_body=ENDLESS)
        next(iter(first))
        return ask(first.close)

    def chat(first_ends: Callable[[], None]) -> Any:
        more = {"return_progress": True}
        heard: list[Any] = []
        for chunk in create(
            model="local", messages=ASK[1:], max_tokens=8, stream=True, extra_body=more, extra_headers=header
        ):
            if not heard:
                first_ends()
            heard.append(chunk)
        waits = [chunk.model_extra["slotkeeper"] for chunk in heard if "slotkeeper" in chunk.model_extra]
        ends = [chunk.choices[0].finish_reason for chunk in heard if chunk.choices]
        return [waits[0]["doing"], waits[0]["place"], waits[0]["wait"], ends[-1]]

    def messages(first_ends: Callable[[], None]) -> Any:
        user: Any = {"role": "user", "content": TASK}
        threading.Timer(2 * PROGRESS_SECONDS, first_ends).start()
        with of_anthropic.messages.stream(
            model="local", max_tokens=8, messages=[user], extra_headers=header
        ) as events:
            kinds = [event.type for event in events]
            return [kinds[0], kinds[-1], events.get_final_message().usage.output_tokens > 0]

    return {
        "openai": got(lambda: behind_another(chat)),
        "anthropic": got(lambda: behind_another(messages)),
    }


USES: Final[dict[str, Callable[[str], Results]]] = {
    "openai": _openai,
    "anthropic": _anthropic,
    "langchain-openai": _langchain,
    "litellm": _litellm,
    "retries": _retried,
    "endless": _endless,
    "waits": _waits,
}

if __name__ == "__main__":
    print(json.dumps(USES[sys.argv[1]](sys.argv[2])))  # noqa: T201 - the test reads it
