"""The lengths of images as the engine counts them, and when a length is no longer trusted."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest

from slotkeeper.api.document import Doc
from slotkeeper.api.pictures import Picture, digests, part_of
from slotkeeper.engine.client import EngineClient
from slotkeeper.runtime import images
from slotkeeper.runtime.images import EngineImages, Pictures
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.vocab.tokenizer import Tokenizer

MARKER = "<__media__>"
PROPS = {"modalities": {"vision": True}, "media_marker": MARKER}
LENGTH = 5  # tokens of an image of the counting engine
A, B = b"a" * 32, b"b" * 32


class Counting(EngineClient):
    """An engine whose tokens are letters, with one token at the beginning of each prompt."""

    def __init__(self) -> None:
        self.counted: list[Doc] = []
        self.pair = 2 * LENGTH  # tokens of two adjacent images

    async def apply_template(self, chat: Any, **_: Any) -> str:
        return "".join(
            MARKER if part["type"] == "image_url" else part["text"]
            for message in chat["messages"]
            for part in message["content"]
        )

    async def count_chat(self, chat: Any, **_: Any) -> int:
        self.counted.append(chat)
        text = await self.apply_template(chat)
        images = text.count(MARKER)
        touching = self.pair if MARKER * 2 in text else images * LENGTH
        return 1 + len(text.replace(MARKER, "")) + touching

    async def detokenize(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(map(chr, ids))

    async def tokenize(self, content: Any, *, add_special: bool, **_: Any) -> list[int]:
        return [1] * add_special + [ord(letter) for letter in content]


class Lab:
    def __init__(self) -> None:
        self.client = Counting()
        self.images = EngineImages(self.client)
        self.images.begins(PROPS)
        self.pictures = [Picture(digest, digest.decode()) for digest in (A, B)]
        self.images.pictures.keep(self.pictures)

        async def ask(content: Any, *, add_special: bool, parse_special: bool) -> list[int]:
            assert parse_special
            return await self.client.tokenize(content, add_special=add_special)

        self.tokenizer = Tokenizer(ask)

    async def tokens(self, *parts: str | bytes) -> Tokens:
        content = [part_of(p) if isinstance(p, bytes) else {"type": "text", "text": p} for p in parts]
        chat = {"messages": [{"role": "user", "content": content}]}
        text = await self.client.apply_template(chat)
        return await self.images.tokens(self.tokenizer, text, digests(chat), {})


@pytest.fixture
def lab() -> Lab:
    return Lab()


def letters(text: str) -> Tokens:
    return Tokens(map(ord, text))


async def test_the_length_of_an_image_is_counted_by_the_engine_once(lab):
    expected = Tokens([1]) + letters("See") + Tokens.image(A, LENGTH) + letters("?")
    assert await lab.tokens("See", A, "?") == expected
    assert await lab.tokens("See", A, "?", A, "!") == expected + Tokens.image(A, LENGTH) + letters("!")
    assert len(lab.client.counted) == 1


async def test_an_image_with_a_contradicted_length_is_not_tokenized_any_more(lab):
    lab.images.distrust(await lab.tokens("See", A, "?"))
    with pytest.raises(ValueError, match="counts an image otherwise"):
        await lab.tokens("See", A, "?")
    assert len(await lab.tokens("See", B, "?")) == 5 + LENGTH
    assert len(lab.client.counted) == 2


async def test_adjacent_images_are_tokenized_only_if_the_engine_counts_them_as_two(lab):
    assert len(await lab.tokens("See", A, B, "?")) == 5 + 2 * LENGTH
    lab.images.begins(PROPS)
    lab.client.pair = LENGTH
    with pytest.raises(ValueError, match="makes one of two"):
        await lab.tokens("See", A, B, "?")
    assert len(await lab.tokens("See", A, " ", B, "?")) == 6 + 2 * LENGTH


async def test_an_image_of_zero_length_is_refused(lab):
    lab.client.pair = 0
    with pytest.raises(ValueError, match="otherwise"):
        await lab.tokens("See", A, B, "?")


async def test_a_template_that_shows_an_image_twice_or_never_is_refused(lab):
    for text in ("See", f"See{MARKER}{MARKER}"):
        with pytest.raises(ValueError, match="each image once"):
            await lab.images.tokens(lab.tokenizer, text, [A], {})


async def test_a_prompt_that_begins_with_an_image_is_refused(lab):
    with pytest.raises(ValueError, match="precedes"):
        await lab.tokens(A, "?")


@pytest.mark.parametrize("closed", [False, True])
async def test_a_prompt_may_end_behind_an_image_only_if_text_is_known_to_follow_images(lab, closed):
    lab.images.begins(PROPS, closed=closed)
    prompt = await lab.tokens("See", A, "?")
    behind = prompt.cut(0, prompt.chunks[0].end)
    assert prompt.may_end(len(behind)) == closed
    if closed:
        assert (await lab.images.prompt(lab.tokenizer, behind, {})).text == f"See{MARKER}"
    else:
        with pytest.raises(ValueError, match="no prompt can end there"):
            await lab.images.prompt(lab.tokenizer, behind, {})


async def test_an_engine_without_vision_has_no_media_marker(lab):
    for props in ({}, {"modalities": None}, {"modalities": {"vision": False}, "media_marker": MARKER}):
        lab.images.begins(props)
        assert lab.images.marker == ""


async def test_a_prompt_with_images_is_sent_as_text_and_image_data(lab):
    prompt = await lab.tokens("See", A, "and", B, "what?")
    sent = await lab.images.prompt(lab.tokenizer, prompt.cut(0, len(prompt) - 2), {})
    assert sent.body == {
        "prompt_string": f"See{MARKER}and{MARKER}wha",
        "multimodal_data": (A.decode(), B.decode()),
    }
    assert len(sent) == len(prompt) - 2
    assert A.decode() not in repr(sent)


async def test_a_prompt_cut_inside_an_image_or_with_a_forgotten_image_is_not_sent(lab):
    prompt = await lab.tokens("See", A, "what?")
    for end in (5, 4 + LENGTH):
        with pytest.raises(ValueError, match="end there"):
            await lab.images.prompt(lab.tokenizer, prompt.cut(0, end), {})
    lab.pictures.clear()
    lab.images.pictures = Pictures()
    with pytest.raises(ValueError, match="not known any more"):
        await lab.images.prompt(lab.tokenizer, prompt, {})


@pytest.mark.parametrize("before", [Tokens([7]) + letters("See"), Tokens([1]) + letters(f"See{MARKER}")])
async def test_token_ids_that_no_text_gives_and_a_text_with_the_marker_are_not_sent(lab, before):
    prompt = before + Tokens.image(A, LENGTH) + letters("?")
    with pytest.raises(ValueError, match="those of any text"):
        await lab.images.prompt(lab.tokenizer, prompt, {})


async def test_the_number_of_remembered_image_lengths_is_limited(lab, monkeypatch):
    monkeypatch.setattr(images, "MOST", 3)
    for number in range(10):
        digest = bytes([number]) * 32
        lab.images.pictures.keep([Picture(digest, "x")])
        await lab.tokens("See", digest, "?")
    assert len(lab.images) == 3


class TestPictures:
    def test_the_total_size_of_images_is_limited(self):
        pictures = Pictures(budget=100)
        for number in range(20):
            pictures.keep([Picture(bytes([number]), "x" * 10)])
        gc.collect()
        assert (len(pictures), pictures.size) == (10, 100)
        assert pictures.find(bytes([19])).data == "x" * 10
        with pytest.raises(ValueError, match="not known"):
            pictures.find(bytes([0]))

    def test_a_running_request_keeps_its_own_images(self):
        pictures, mine = Pictures(budget=10), Picture(b"mine", "x" * 50)
        pictures.keep([mine])
        pictures.keep([Picture(b"other", "x" * 50)])
        assert (len(pictures), pictures.size) == (0, 0)
        assert pictures.find(b"mine") is mine

    def test_a_repeated_image_is_counted_once(self):
        pictures = Pictures(budget=100)
        for _ in range(5):
            pictures.keep([Picture(b"a", "x" * 40)])
        assert pictures.size == 40
