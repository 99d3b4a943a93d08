"""Why a sampled tool call does not come back as it was sampled, and why that cannot be fixed.

The chat route takes texts and tokenizes them; what a model sampled under a grammar is seldom what the
tokenizer makes of its text. The call in an answer lacks the white space around its arguments, and a stream
has no token ids (engine.md 3).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import httpx
import orjson
import pytest
from benchmarks.sessions import TOOL

from patience import PATIENCE
from slotkeeper.bench.texts import prose, system
from slotkeeper.engine.client import EngineClient
from slotkeeper.scheduler.prompts.tokens import Tokens

TEMPLATES = Path(__file__).parent / "templates"
CHAT = "/v1/chat/completions"
IDS = {"verbose": True, "return_tokens": True}
TRIES = 24
THINK, END = "<think>\n", "<|im_end|>"


@dataclass(frozen=True)
class Sampled:
    """A reply with calls: the request, the answer, and the sampled tokens."""

    body: dict
    prompt: str
    prompt_ids: Tokens
    message: dict
    text: str  # without the token that ended the turn
    ids: Tokens  # with it

    @property
    def kept(self) -> Tokens:
        """Return the slot's contents: all but the last token (engine.md 1.5)."""
        return (self.prompt_ids + self.ids).cut(0, len(self.prompt_ids) + len(self.ids) - 1)

    def versions(self) -> dict[str, dict]:
        """Return the ways in which a client could send the reply back."""
        calls = self.message["tool_calls"]
        twice = [with_arguments(call, json.dumps(call["function"]["arguments"])) for call in calls]
        return {
            "as told": {**self.message, "tool_calls": calls},
            "arguments as a text in a text": {**self.message, "tool_calls": twice},
            "all as content": {"role": "assistant", "content": THINK + self.text},
        }


def with_arguments(call, text):
    return {**call, "function": {**call["function"], "arguments": text}}


def question(number):
    """Return a short chat that must be answered with a call."""
    messages = [system("Be brief."), {"role": "user", "content": f"{number}. {prose(100, number)}"}]
    fields = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 500, "temperature": 0}
    return {"messages": messages, **fields}


async def ids_of(engine: EngineClient, text: str) -> Tokens:
    return Tokens(await engine.tokenize(text, add_special=True, parse_special=True))


async def sampled(engine: EngineClient, base: str, number: int) -> Sampled | None:
    """Sample a reply; None if it has no complete call."""
    body = question(number)
    prompt = await engine.apply_template(body)
    answer = await asked(base, {**body, **IDS})
    doc, told = answer.json(), answer.json()["__verbose"]
    choice = doc["choices"][0]
    if choice["finish_reason"] != "tool_calls":
        return None
    assert len(told["tokens"]) == doc["usage"]["completion_tokens"]
    return Sampled(
        body=body,
        prompt=prompt,
        prompt_ids=await ids_of(engine, prompt),
        message=choice["message"],
        text=told["content"],
        ids=Tokens(told["tokens"]),
    )


async def asked(base, body) -> httpx.Response:
    async with httpx.AsyncClient(base_url=base, timeout=PATIENCE, headers={"Connection": "close"}) as http:
        return await http.post(CHAT, json=body)


async def rendered(engine: EngineClient, reply: Sampled, message: dict) -> str:
    """Return the next prompt, with a result for every call."""
    ids = [call["id"] for call in reply.message["tool_calls"]]
    results = [{"role": "tool", "tool_call_id": id_, "content": "x"} for id_ in ids]
    return await engine.apply_template(
        {**reply.body, "messages": [*reply.body["messages"], message, *results]}
    )


async def replies(engine: EngineClient, base: str):
    for number in range(TRIES):
        if reply := await sampled(engine, base, number):
            yield reply


async def test_a_sampled_call_never_comes_back_with_the_same_token_ids(engine):
    async with EngineClient(engine.base) as client:
        found = [reply async for reply in replies(client, engine.base)][:6]
        assert len(found) == 6
        for reply in found:
            said = reply.prompt + reply.text + END
            told = [call["function"]["arguments"] for call in reply.message["tool_calls"]]
            assert all(arguments in reply.text for arguments in told), "as they were sampled"
            texts = {name: await rendered(client, reply, way) for name, way in reply.versions().items()}
            assert texts["all as content"].startswith(said), "the very text"
            behind = texts["all as content"].removeprefix(said)
            assert texts["as told"].endswith(END + behind), "and the results behind it are the same"
            assert not texts["as told"].startswith(said)
            assert not texts["arguments as a text in a text"].startswith(said)
            for name, text in texts.items():
                common = reply.kept.lcp(await ids_of(client, text))
                assert len(reply.prompt_ids) < common < len(reply.kept), name


async def test_equal_token_counts_do_not_prove_equal_token_ids(engine):
    """It happens to 3 to 7 of 40 replies, depending on the form in which they are sent back."""
    async with EngineClient(engine.base) as client:
        async for reply in replies(client, engine.base):
            total = len(reply.kept)
            for way in reply.versions().values():
                ids = await ids_of(client, await rendered(client, reply, way))
                ends = reply.ids.ids()[-1] in ids.cut(total, total + 2).ids()
                if ends and ids.lcp(reply.kept) < total:
                    return
    pytest.fail("no reply had the same count but other ids")


async def test_a_stream_with_tools_does_not_contain_its_token_ids(engine):
    body = question(1)
    whole = (await asked(engine.base, {**body, **IDS})).json()["__verbose"]
    assert len(whole["tokens"]) > 20
    assert "<tool_call>" in whole["content"]
    refused = await asked(engine.base, {**body, "stream": True, "logprobs": True})
    assert refused.status_code == 400
    stream = await asked(engine.base, {**body, **IDS, "stream": True})
    events = [orjson.loads(line[6:]) for line in stream.text.split("\n") if line.startswith("data: {")]
    told = [event["__verbose"] for event in events if "__verbose" in event]
    assert [(verbose["tokens"], verbose["content"]) for verbose in told] == [([], "")]
    assert whole["content"] not in stream.text


ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Read a.py"}]
SPACED, COMPACT = '{"path": "a.py"}', '{"path":"a.py"}'
CALL = {"id": "c12345678", "type": "function", "function": {"name": "read_file", "arguments": COMPACT}}
RESULT = {"role": "tool", "tool_call_id": "c12345678", "content": "x = 1"}


@dataclass(frozen=True)
class Family:
    """How a template ends a call, and which messages come back with other white space in a call."""

    end: str
    content: bool
    twice: bool


FAMILIES = {
    "chatml": Family("<|im_end|>", content=True, twice=True),
    "llama3": Family("<|eot_id|>", content=True, twice=False),
    "mistral": Family("<|im_end|>", content=True, twice=False),  # the tiny model's end of sequence
    "mistral-old": Family("<|im_end|>", content=False, twice=False),  # puts a space before any text
    "harmony": Family("<|call|>", content=False, twice=False),  # a text gets another channel
}


@pytest.mark.parametrize("name", FAMILIES)
async def test_the_template_decides_which_message_renders_a_call_as_it_was_sampled(
    engine_factory, build, name
):
    family = FAMILIES[name]
    args = ["-c", "4096", "-np", "1"]
    if name != "chatml":  # the tiny model's own
        args += ["--chat-template-file", str(TEMPLATES / f"{name}.jinja")]
    started = engine_factory("tiny-dense", build, args=args)
    async with EngineClient(started.base) as client:

        async def text(*more):
            return await client.apply_template({"messages": [*ASKED, *more], "tools": [TOOL]})

        prompt = await text()
        came = await text({"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT)
        assert SPACED in came, "the engine parses the arguments and writes them again"
        written = came.replace(SPACED, COMPACT)
        opened = prompt.removesuffix(THINK)
        said = written[len(opened) : written.index(family.end, len(opened) + 1)]
        content = await text({"role": "assistant", "content": said}, RESULT)
        twice = with_arguments(CALL, json.dumps(COMPACT))
        again = await text({"role": "assistant", "content": "", "tool_calls": [twice]}, RESULT)
        assert (content == written, again == written) == (family.content, family.twice)
