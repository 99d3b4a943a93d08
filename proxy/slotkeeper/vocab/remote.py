"""Asking the engine for token ids: what it calls special, and many pieces in one call.

`POST /tokenize` never enters the engine's task queue (engine.md 1.4). Its `content` may mix strings and
ids: every string is tokenized alone and ids are passed through, so an id that cannot come out of any
piece tells us where each piece ends.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Final, Protocol

from slotkeeper.scheduler.tokens import Tokens
from slotkeeper.vocab.special import independent

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# What a special token looks like in a chat template: <|im_start|>, <start_of_turn>, </s>, [INST]
_LOOKS_SPECIAL: Final = re.compile(r"<[^<>\s'\"{}()]{1,48}>|\[/?[A-Z_]{2,24}\]")
# Templates that build theirs from parts ('<|' + role + '|>') do not show them whole
_USUAL: Final = (
    "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|eot_id|>",
    "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>", "<end_of_turn>", "<|endoftext|>",
)  # fmt: skip
MAX_CANDIDATES: Final = 48  # two small calls each, once per engine
THREAD_IDS: Final = 200_000  # some 4 ms of packing: more would be felt by other requests' streams


class TokenizeCall(Protocol):
    """`POST /tokenize` of one engine. The engine client provides it."""

    async def __call__(
        self, content: str | list[int | str], *, add_special: bool, parse_special: bool
    ) -> list[int]: ...


class TokenizeError(RuntimeError):
    """The engine's answer does not have the shape that we rely on."""


async def learn_cuts(ask: TokenizeCall, candidates: Iterable[str]) -> dict[str, int]:
    """Find out which candidates are control tokens: one id if parsed as special, another result if not.

    User-defined tokens give the same id both ways, as any word may: they stay inside the pieces, where
    the engine finds them itself.
    """
    found: dict[str, int] = {}
    for text in list(dict.fromkeys(candidates))[:MAX_CANDIDATES]:
        parsed = await ask(text, add_special=False, parse_special=True)
        if len(parsed) == 1 and await ask(text, add_special=False, parse_special=False) != parsed:
            found[text] = parsed[0]
    return {text: found[text] for text in independent(found, found)}


def candidates_in(chat_template: str, hints: Iterable[str] = ()) -> list[str]:
    """Texts that may be special tokens, the most likely first; `hints` are BOS and EOS."""
    return list(dict.fromkeys([*filter(None, hints), *_LOOKS_SPECIAL.findall(chat_template), *_USUAL]))


async def learn_affixes(ask: TokenizeCall) -> tuple[Tokens, Tokens]:
    """Return what add_special=true puts before and after a text: BOS, EOS or nothing."""
    plain = await ask("hello", add_special=False, parse_special=True)
    full = await ask("hello", add_special=True, parse_special=True)
    for start in range(len(full) - len(plain) + 1):
        if plain and full[start : start + len(plain)] == plain:
            return Tokens(full[:start]), Tokens(full[start + len(plain) :])
    raise TokenizeError("add_special changes the tokens of the text itself")


async def tokens_of(ids: list[int]) -> Tokens:
    """The ids of an answer, beside the event loop where they are many."""
    return Tokens(ids) if len(ids) < THREAD_IDS else await asyncio.to_thread(Tokens, ids)


class RemoteEncoder:
    """Tokenizes all pieces in one call."""

    def __init__(self, ask: TokenizeCall, cuts: Mapping[str, int]) -> None:
        self._ask = ask
        # any cut will do: pieces never contain its text, and nothing else gives its id
        self._separator = next(iter(cuts.values()), None)

    async def __call__(self, pieces: Sequence[str], /) -> list[Tokens]:
        separator = self._separator
        if len(pieces) == 1 or separator is None:
            return [await self._tokens(piece) for piece in pieces]
        content: list[int | str] = []
        for piece in pieces:
            content += [separator, piece]
        # the array begins with an id: so no piece is the first string, the only one that gets BOS
        return _cut_at(await self._tokens(content), separator, len(pieces))

    async def _tokens(self, content: str | list[int | str]) -> Tokens:
        return await tokens_of(await self._ask(content, add_special=False, parse_special=True))


def _cut_at(ids: Tokens, separator: int, count: int) -> list[Tokens]:
    starts = ids.find_all(Tokens([separator]), most=count + 1)
    if len(starts) != count or starts[0] != 0:
        raise TokenizeError(f"{len(starts)} separators came back where {count} were sent")
    ends = [*starts[1:], len(ids)]
    return [ids.cut(start + 1, end) for start, end in zip(starts, ends, strict=True)]
