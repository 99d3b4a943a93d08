"""The tiny models' vocabulary: 3072 byte-level BPE tokens in the shape of Qwen's.

The merges were trained once on parts of the Python standard library and are data here
(`merges.txt`, one pair a line), so that the files are the same on every machine.
"""

from __future__ import annotations

import re
from enum import IntEnum
from importlib.resources import files
from itertools import pairwise
from typing import Final

from slotkeeper.vocab.bpe import byte_alphabet

N_VOCAB: Final = 3072
CONTROL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# The two that carry white space let the weights tell "<think>\n" from "assistant\n"; the text on
# the wire is the same as Qwen3's.
USER_DEFINED: Final = (
    "<think>", "</think>", "<think>\n", "\n</think>\n\n",
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
)  # fmt: skip
_UNRANKED: Final = 1 << 30


class TokenKind(IntEnum):
    """A token's type as GGUF numbers it."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5


def chat_template() -> str:
    """ChatML with Qwen3's rules.

    `chat_template_kwargs` that it knows: enable_thinking=false (an empty think block in the generation
    prompt, as Qwen3.5), preserve_thinking=true (reasoning is kept in every turn, as Qwen3.6), plain=true
    (no think block at all: history renders exactly as it was generated).
    """
    return files(__package__).joinpath("chat.jinja").read_text("utf-8").rstrip("\n")


def _merges() -> list[tuple[str, str]]:
    lines = files(__package__).joinpath("merges.txt").read_text("utf-8").splitlines()
    return [(left, right) for left, right in (line.split(" ") for line in lines)]


class Vocabulary:
    """Tokens, their types and their merges, in the order of their ids."""

    def __init__(self) -> None:
        self.merges: list[tuple[str, str]] = _merges()
        self._rank = {pair: rank for rank, pair in enumerate(self.merges)}
        # dict.fromkeys: two merges may make the same token, which then has one id
        self.tokens: list[str] = list(dict.fromkeys([*byte_alphabet(), *(a + b for a, b in self.merges)]))
        self.kinds: list[int] = [TokenKind.NORMAL] * len(self.tokens)
        self._extend(CONTROL, TokenKind.CONTROL)
        self._extend(USER_DEFINED, TokenKind.USER_DEFINED)
        self._extend([f"<|reserved_{n}|>" for n in range(len(self.tokens), N_VOCAB)], TokenKind.UNUSED)
        self.id: dict[str, int] = {token: number for number, token in enumerate(self.tokens)}

    def _extend(self, tokens: tuple[str, ...] | list[str], kind: TokenKind) -> None:
        self.tokens.extend(tokens)
        self.kinds.extend([kind] * len(tokens))

    def words(self, pattern: str) -> list[int]:
        """Ids of the normal tokens that match and that BPE makes when it sees exactly that text.

        Only those survive the way through a client, which sends text back, not ids.
        """
        matches = re.compile(pattern).fullmatch
        return [
            number
            for number, token in enumerate(self.tokens)
            if self.kinds[number] == TokenKind.NORMAL and matches(token) and self._encode(token) == [token]
        ]

    def _encode(self, symbols: str) -> list[str]:
        parts = list(symbols)
        while len(parts) > 1:
            ranks = [self._rank.get(pair, _UNRANKED) for pair in pairwise(parts)]
            best = ranks.index(min(ranks))
            if ranks[best] == _UNRANKED:
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        return parts
