"""Images in prompts: the tokens that each image takes on an engine, and our own prompts with images.

The engine is asked once for each image and process how many tokens the image takes, with the text that the
engine puts around it. It counts exactly, takes no slot and computes nothing (engine.md 15). The count in each
answer is compared with that number; after one that differs, prompts with these images stay unrendered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final
from weakref import WeakValueDictionary

from slotkeeper.api.document import Doc
from slotkeeper.api.pictures import Picture, part_of, with_images
from slotkeeper.engine.answers import MediaPrompt, media_marker
from slotkeeper.engine.client import EngineClient
from slotkeeper.scheduler.prompts.tokens import EMPTY, Tokens, text_ranges
from slotkeeper.vocab.tokenizer import Tokenizer

BUDGET: Final = 64 << 20  # characters of base64 kept for requests that have ended
MOST: Final = 4096  # known lengths of images and of pairs of images; the oldest are evicted
_AROUND: Final[Doc] = {"type": "text", "text": "x"}  # text on both sides of the images


class Pictures:
    """The images of running requests and of recently ended ones, which plants in idle time need."""

    def __init__(self, budget: int = BUDGET) -> None:
        self._budget = budget
        self._there: WeakValueDictionary[bytes, Picture] = WeakValueDictionary()
        self._recent: OrderedDict[bytes, Picture] = OrderedDict()
        self.size = 0  # characters of base64 in `_recent`

    def __len__(self) -> int:
        return len(self._recent)

    def keep(self, pictures: Iterable[Picture]) -> None:
        """Keep the images of a request; images beyond the budget are dropped when their request ends."""
        for picture in pictures:
            if (before := self._recent.pop(picture.digest, None)) is not None:
                self.size -= len(before.data)
            self._there[picture.digest] = self._recent[picture.digest] = picture
            self.size += len(picture.data)
        while self.size > self._budget:
            self.size -= len(self._recent.popitem(last=False)[1].data)

    def find(self, digest: bytes) -> Picture:
        """Return the image of this digest. Raises ValueError if it is no longer kept."""
        if (picture := self._there.get(digest)) is None:
            raise ValueError("an image is not known any more")
        return picture


class EngineImages:
    """The lengths of images on one engine, and prefills with images. A new engine process clears them."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self.pictures = Pictures()
        self.marker = ""  # represents each image in a rendered text; "" if the engine accepts no images
        self._closed = False  # whether its projector is known to put text behind each image
        self._lengths: OrderedDict[Sequence[bytes], int | None] = OrderedDict()  # None: a count differed
        self._frame: int | None = None  # tokens of the counted chat without its images

    def __len__(self) -> int:
        return len(self._lengths)

    def begins(self, props: Mapping[str, Any], *, closed: bool = False) -> None:
        """Read the marker from /props and clear all lengths, because the engine may have restarted.

        `closed`: its projector is known to put text behind each image.
        """
        self.marker = media_marker(props)
        self._closed = closed
        self._lengths.clear()
        self._frame = None

    async def tokens(
        self, tokenizer: Tokenizer, text: str, images: Sequence[bytes], auth: Mapping[str, str]
    ) -> Tokens:
        """Return the tokens of a rendered chat with these images.

        Raises ValueError if the tokens cannot be known, and the errors of the engine's client.
        """
        texts = text.split(self.marker)
        if len(texts) != len(images) + 1:
            raise ValueError("the template does not show each image once")
        found = await _beginning(tokenizer, texts[0])
        for digest, behind in zip(images, texts[1:], strict=True):
            length = await self._length(tokenizer, (digest,), auth)
            image = Tokens.image(digest, length, closed=self._closed)
            found += image + await tokenizer.tokenize(behind, add_special=False)
        for one, other in ((one, other) for one, other in pairwise(found.chunks) if one.end == other.start):
            # Some builds read two adjacent images as two frames of one image (engine.md 15).
            if await self._length(tokenizer, (one.digest, other.digest), auth) != one.length + other.length:
                raise ValueError("the engine makes one of two images")
        return found

    def distrust(self, prompt: Tokens) -> None:
        """Stop rendering prompts with these images, because the engine's count differed."""
        for chunk in prompt.chunks:
            self._remember((chunk.digest,), None)

    async def _length(self, tokenizer: Tokenizer, images: Sequence[bytes], auth: Mapping[str, str]) -> int:
        """Return how many tokens adjacent images take, with the text that the engine puts around them."""
        if images not in self._lengths:
            self._remember(images, await self._asked(tokenizer, images, auth))
        if not (length := self._lengths[images]):
            raise ValueError("the engine counts an image otherwise")
        return length

    async def _asked(self, tokenizer: Tokenizer, images: Sequence[bytes], auth: Mapping[str, str]) -> int:
        content = [_AROUND, *map(part_of, images), _AROUND]
        chat: Doc = {"messages": [{"role": "user", "content": content}]}
        if self._frame is None:
            text = await self._client.apply_template(chat, headers=auth)
            first, *others = text.split(self.marker)
            behind = [await tokenizer.tokenize(other, add_special=False) for other in others]
            self._frame = len(await _beginning(tokenizer, first)) + sum(map(len, behind))
        counted = await self._client.count_chat(with_images(chat, self.pictures.find), headers=auth)
        return max(0, counted - self._frame)

    def _remember(self, images: Sequence[bytes], length: int | None) -> None:
        self._lengths[images] = length
        self._lengths.move_to_end(images)
        if len(self._lengths) > MOST:
            self._lengths.popitem(last=False)

    # -- our own prompts ---------------------------------------------------------------------------

    async def prompt(self, tokenizer: Tokenizer, tokens: Tokens, auth: Mapping[str, str]) -> MediaPrompt:
        """Return the text and images of which the engine makes exactly these tokens.

        Raises ValueError if there is no such text, and the errors of the engine's client.
        """
        if not self.marker or not tokens.may_end(len(tokens)):
            raise ValueError("no prompt can end there")
        parts = [tokens.cut(*ends) for ends in text_ranges(tokens.chunks, len(tokens))]
        texts = [await self._text(tokenizer, parts[0], auth, begins=True)]
        texts += [await self._text(tokenizer, part, auth) for part in parts[1:]]
        data = tuple(self.pictures.find(chunk.digest).data for chunk in tokens.chunks)
        return MediaPrompt(text=self.marker.join(texts), data=data, length=len(tokens))

    async def _text(
        self, tokenizer: Tokenizer, ids: Tokens, auth: Mapping[str, str], *, begins: bool = False
    ) -> str:
        """Return a text that the engine tokenizes to these ids. Raises ValueError if there is none."""
        special = await tokenizer.tokenize("") if begins else EMPTY
        bare = ids.cut(len(special))
        text = await self._client.detokenize(bare.ids(), headers=auth) if bare else ""
        again = await tokenizer.tokenize(text, add_special=begins)
        if again != ids.within("") or self.marker in text:
            raise ValueError("the ids are not those of any text")
        return text


async def _beginning(tokenizer: Tokenizer, text: str) -> Tokens:
    """Return the ids of the text before the first image, before which the engine puts only BOS."""
    bare, found = await tokenizer.tokenize(text, add_special=False), await tokenizer.tokenize(text)
    if not text or found.cut(len(found) - len(bare)) != bare:
        raise ValueError("a special token follows the prompt, or no text precedes its image")
    return found
