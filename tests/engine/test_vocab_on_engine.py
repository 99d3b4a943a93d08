"""Our token ids are the engine's, in every mode, on both builds and all five tiny models."""

from __future__ import annotations

import random
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from patience import PATIENCE
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.models import build as build_model
from slotkeeper.vocab.gguf import read_vocabulary
from slotkeeper.vocab.tokenizer import Tokenizer

MODELS = [tiny.value for tiny in Tiny]
SPECIALS = [
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<think>\n", "\n</think>\n\n",
    "<tool_call>", "</tool_call>", "<|im_start|", "im_end|>", "<|reserved_3071|>",
]  # fmt: skip
CODE = 'def f(self, *a: int) -> dict[str, int]:\n\t"""Doc."""\n    return {k: v**2 for k, v in a}  # x\r\n\n'


class Ask:
    """POST /tokenize, counted."""

    def __init__(self, base: str) -> None:
        self.http = httpx.AsyncClient(base_url=base, timeout=PATIENCE)
        self.calls = 0
        self.sent = 0

    async def __call__(
        self, content: str | list[int | str], *, add_special: bool, parse_special: bool
    ) -> list[int]:
        self.calls += 1
        self.sent += len(content) if isinstance(content, str) else sum(len(str(part)) for part in content)
        body = {"content": content, "add_special": add_special, "parse_special": parse_special}
        answer = await self.http.post("/tokenize", json=body)
        answer.raise_for_status()
        ids: list[int] = answer.json()["tokens"]
        return ids

    async def whole(self, text: str) -> list[int]:
        return await self(text, add_special=True, parse_special=True)


@pytest_asyncio.fixture
async def ask(engine: Any) -> AsyncIterator[Ask]:
    ask = Ask(engine.base)
    yield ask
    await ask.http.aclose()


async def opened(ask: Ask, engine: Any, *, local: bool) -> Tokenizer:
    props = (await ask.http.get("/props")).json()
    return await Tokenizer.open(
        ask,
        model_path=engine.model if local else None,
        chat_template=props["chat_template"],
        bos_token=props["bos_token"],
        eos_token=props["eos_token"],
    )


def texts(seed: int) -> list[str]:
    """Return code, any Unicode, and special tokens in unusual places."""
    chance = random.Random(seed)
    alphabet = [chr(c) for c in range(0x20, 0x24F)] + list("\n\n\n\t\r   中文🎉👩\u200d\u0301\u00a0\u3000٣½")

    def any_unicode() -> str:
        points = (chance.randrange(1, 0x11000) for _ in range(chance.randrange(40)))
        return "".join(chr(c) for c in points if not 0xD800 <= c <= 0xDFFF)

    def piece() -> str:
        words = "".join(chance.choices(alphabet, k=chance.randrange(30)))
        return chance.choice([words, any_unicode(), CODE[: chance.randrange(len(CODE))]])

    made = []
    for _ in range(40):
        parts = [chance.choice([piece(), chance.choice(SPECIALS)]) for _ in range(chance.randrange(1, 12))]
        made.append("".join(parts))
    return made


@pytest.mark.parametrize("local", [True, False], ids=["local", "segments"])
@pytest.mark.parametrize("engine", MODELS, indirect=True)
async def test_every_text_gets_the_engines_token_ids(engine: Any, ask: Ask, local: bool) -> None:
    tokenizer = await opened(ask, engine, local=local)
    assert tokenizer.mode == ("local" if local else "segments"), tokenizer
    for text in texts(seed=len(str(engine.model))):
        assert (await tokenizer.tokenize(text)).ids() == await ask.whole(text), repr(text)


@pytest.mark.parametrize("engine", MODELS, indirect=True)
async def test_a_rendered_chat_has_the_token_count_of_the_engine(engine: Any, ask: Ask) -> None:
    tokenizer = await opened(ask, engine, local=True)
    call = {"type": "function", "id": "1", "function": {"name": "run", "arguments": '{"a": [1, "<think>"]}'}}
    chat = {
        "messages": [
            {"role": "system", "content": "Be brief. <|im_end|> is a token."},
            {"role": "user", "content": "<think>\n</think>\n\n" + CODE},
            {"role": "assistant", "content": "Yes.", "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "naïve 中文"},
        ],
        "max_tokens": 1,
    }
    rendered = (await ask.http.post("/apply-template", json=chat)).json()["prompt"]
    tokens = await tokenizer.tokenize(rendered)
    assert tokens.ids() == await ask.whole(rendered)
    answer = (await ask.http.post("/v1/chat/completions", json=chat)).json()
    assert len(tokens) == answer["usage"]["prompt_tokens"]


async def test_strings_in_a_mixed_array_get_the_same_token_ids_as_alone(engine: Any, ask: Ask) -> None:
    vocabulary = read_vocabulary(engine.model)
    separator = vocabulary.tokens.index("<|im_end|>")
    pieces = [text.replace("<|im_end|>", "") for text in texts(seed=7)]
    content: list[int | str] = [part for piece in pieces for part in (separator, piece)]
    alone = [await ask(piece, add_special=False, parse_special=True) for piece in pieces]
    expected = [number for ids in alone for number in (separator, *ids)]
    assert await ask(content, add_special=False, parse_special=True) == expected


async def test_a_longer_conversation_sends_only_its_new_text_to_the_tokenizer(engine: Any, ask: Ask) -> None:
    tokenizer = await opened(ask, engine, local=False)
    text = "".join(f"<|im_start|>user\nturn {n} {CODE}<|im_end|>\n" for n in range(100))
    await tokenizer.tokenize(text)
    calls, sent = ask.calls, ask.sent
    await tokenizer.tokenize(text)
    assert (ask.calls, ask.sent) == (calls, sent)
    new = "<|im_start|>user\nsomething new<|im_end|>\n<|im_start|>assistant\nand a second piece"
    assert (await tokenizer.tokenize(text + new)).ids() == await ask.whole(text + new)
    assert ask.calls == calls + 2  # ours and the comparison
    assert ask.sent - sent - len(text + new) < 2 * len(new)


def with_bos(folder: Path) -> Path:
    """Return tiny-dense with a file that says that a text begins with BOS."""
    data = build_model(Tiny.DENSE).read_bytes()
    key = b"tokenizer.ggml.add_bos_token" + struct.pack("<I", 7)
    assert data.count(key + b"\0") == 1
    path = folder / "with-bos.gguf"
    path.write_bytes(data.replace(key + b"\0", key + b"\1"))
    return path


@pytest.mark.parametrize("local", [True, False], ids=["local", "segments"])
async def test_bos_and_raw_prompts_get_the_engines_token_count(
    engine_factory: Any, build: str, local: bool, tmp_path: Path
) -> None:
    engine = engine_factory("tiny-dense", build, args=["-m", str(with_bos(tmp_path))])
    ask = Ask(engine.base)
    try:
        bos = (await ask("", add_special=True, parse_special=True))[0]
        tokenizer = await opened(ask, engine, local=local)
        assert tokenizer.mode == ("local" if local else "segments")
        prompts: tuple[str | list[int | str], ...]
        prompts = ("hi there", "", ["hi"], ["hi", 5, "there", 6, 7], [5, "hi"], [1, 2, 3])
        for prompt in prompts:
            tokens = await tokenizer.tokenize_prompt(prompt)
            body = {"prompt": prompt, "n_predict": 0, "cache_prompt": False}
            answer = (await ask.http.post("/completion", json=body)).json()
            counted = answer[0] if isinstance(answer, list) else answer
            assert len(tokens) == counted["tokens_evaluated"], prompt
            first_is_text = isinstance(prompt, str) or isinstance(prompt[0], str)
            assert (tokens[0] == bos) == first_is_text
    finally:
        await ask.http.aclose()
