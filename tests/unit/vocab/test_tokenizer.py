"""The tokenizer uses the fastest mode that agrees with the engine, and falls back to safer ones."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

import pytest

from slotkeeper.bench.models import Tiny, build
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.vocab import tokenizer as module
from slotkeeper.vocab.gguf import read_vocabulary
from slotkeeper.vocab.tokenizer import LocalVocab, Tokenizer, UnsupportedError

if TYPE_CHECKING:
    from pathlib import Path

BOS = 3061
CHAT = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nYes<|im_end|>\n"


@cache
def vocab() -> LocalVocab:
    return LocalVocab(read_vocabulary(build(Tiny.DENSE)))


class Engine:
    """POST /tokenize of tiny-dense. `takes`: the types of content that it does not refuse."""

    def __init__(self, *, bos: bool = True, takes: tuple[type, ...] = (str, list)) -> None:
        self.prefix = [BOS] if bos else []
        self.calls: list[str | list[int | str]] = []
        self._takes = takes

    async def __call__(
        self, content: str | list[int | str], *, add_special: bool, parse_special: bool
    ) -> list[int]:
        self.calls.append(content)
        if not isinstance(content, self._takes):
            raise ConnectionError("content of this type is refused")
        ids = list(self.prefix) if add_special and not isinstance(content, list) else []
        for part in content if isinstance(content, list) else [content]:
            ids += [part] if isinstance(part, int) else self.string(part, parse_special)
        return ids

    def string(self, text: str, parse_special: bool) -> list[int]:
        if parse_special:
            return vocab().tokenize(text).ids()
        # control tokens are plain text: split, so that they are not recognised
        return [i for part in re.split(r"(?<=<)(?=\|)", text) for i in vocab().tokenize(part).ids()]


class Stripping(Engine):
    """Special tokens swallow the blanks after them (LLAMA_TOKEN_ATTR_RSTRIP)."""

    def string(self, text: str, parse_special: bool) -> list[int]:
        return super().string(re.sub(r"(<\|im_end\|>)\s+", r"\1", text), parse_special)


async def opened(engine: Engine, path: Path | None = None) -> Tokenizer:
    template = "{{ '<|im_start|>' + message + '<|im_end|>' }}"
    return await Tokenizer.open(engine, model_path=path, chat_template=template)


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("bos", [True, False])
async def test_every_mode_gives_the_ids_of_the_engine(local: bool, bos: bool) -> None:
    engine = Engine(bos=bos)
    tokenizer = await opened(engine, build(Tiny.DENSE) if local else None)
    modes = ["local", "segments", "whole"] if local else ["segments", "whole"]
    for mode in modes:
        assert tokenizer.mode == mode
        for add_special in (True, False):
            expected = [*engine.prefix * add_special, *vocab().tokenize(CHAT)]
            assert (await tokenizer.tokenize(CHAT, add_special=add_special)).ids() == expected
        tokenizer.distrust("the engine counted 7")
    assert tokenizer.mode == "whole"
    assert "the engine counted 7" in tokenizer.why


@pytest.mark.parametrize(
    ("engine", "local", "why"),
    [
        (Stripping(), False, "segments"),
        (Engine(takes=(str,)), False, "segments"),
        (Stripping(), True, "local differs from the engine"),
        (Engine(takes=()), False, "refused"),
    ],
    ids=["strips", "no arrays", "a local vocabulary that disagrees", "no answer"],
)
async def test_an_engine_whose_texts_cannot_be_cut_tokenizes_whole_texts(
    engine: Engine, local: bool, why: str
) -> None:
    tokenizer = await opened(engine, build(Tiny.DENSE) if local else None)
    assert tokenizer.mode == "whole"
    assert why in tokenizer.why
    if why != "refused":
        assert (await tokenizer.tokenize(CHAT)).ids() == [BOS, *engine.string(CHAT, parse_special=True)]


async def test_an_unreadable_model_is_tokenized_by_the_engine(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF what")
    tokenizer = await opened(Engine(), tmp_path / "model.gguf")
    assert tokenizer.mode == "segments"
    assert "model.gguf" in repr(tokenizer)


@pytest.mark.parametrize("local", [True, False])
async def test_a_known_conversation_needs_no_call_to_the_engine(local: bool) -> None:
    engine = Engine()
    tokenizer = await opened(engine, build(Tiny.DENSE) if local else None)
    await tokenizer.tokenize(CHAT)
    engine.calls.clear()
    await tokenizer.tokenize(CHAT + CHAT)
    assert engine.calls == []


async def test_new_pieces_are_tokenized_in_one_call() -> None:
    engine = Engine()
    tokenizer = await opened(engine)
    engine.calls.clear()
    await tokenizer.tokenize(CHAT)
    assert len(engine.calls) == 1
    assert [part for part in engine.calls[0] if part == "user\nHello"] == ["user\nHello"]


async def test_raw_prompts_get_a_bos_token_only_before_a_leading_string() -> None:
    tokenizer = await opened(Engine())
    hi, you = vocab().tokenize("hi").ids(), vocab().tokenize(" you").ids()
    expected = {
        ("hi",): [BOS, *hi],
        (7, "hi", 8): [7, *hi, 8],
        ("hi", 7, " you"): [BOS, *hi, 7, *you],
        (1, 2): [1, 2],
        (): [],
    }
    for prompt, ids in expected.items():
        assert (await tokenizer.tokenize_prompt(list(prompt))).ids() == ids
    assert (await tokenizer.tokenize_prompt("")).ids() == [BOS]


@pytest.mark.parametrize("prompt", [["a", "b"], [1 << 40], [1.5]])
async def test_invalid_prompts_are_refused(prompt: list[int | str]) -> None:
    tokenizer = await opened(Engine())
    with pytest.raises(ValueError, match=r"prompts|token id"):
        await tokenizer.tokenize_prompt(prompt)


@pytest.mark.parametrize("threshold", [0, 1 << 30])
async def test_tokenizing_in_a_thread_gives_the_same_ids(
    threshold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "THREAD_CHARS", threshold)
    tokenizer = await opened(Engine(), build(Tiny.DENSE))
    assert (await tokenizer.tokenize(CHAT)).ids() == [BOS, *vocab().tokenize(CHAT)]


async def test_a_text_that_cannot_be_encoded_locally_is_tokenized_by_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine()
    tokenizer = await opened(engine, build(Tiny.DENSE))
    expected = vocab().tokenize("blanks")

    def refuse(_: LocalVocab, text: str, **__: bool) -> Tokens:
        monkeypatch.undo()
        raise UnsupportedError(text)

    monkeypatch.setattr(LocalVocab, "tokenize", refuse)
    assert await tokenizer.tokenize("blanks", add_special=False) == expected
    assert engine.calls[-1] == "blanks"
