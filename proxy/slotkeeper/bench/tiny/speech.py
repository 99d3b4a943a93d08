r"""What the tiny models say: well-behaved nonsense, from structure in the embedding and output matrix.

A plainly random model emits token sequences that BPE would have merged, so the text a client sends
back tokenizes differently and every chat diverges inside the assistant message (engine.md 12).
Greedy output here is whole " word" tokens, driven by a small state machine:
"<think>\n" -> reasoning words -> "\n</think>\n\n" -> answer words -> <|im_end|>, and where a
grammar forbids <|im_end|> (tool_choice "required"), <tool_call> instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from slotkeeper.bench.tiny.weights import N_FLAGS, D, Sheet
from slotkeeper.vocab.bpe import byte_alphabet

if TYPE_CHECKING:
    from slotkeeper.bench.tiny.vocabulary import Vocabulary
    from slotkeeper.bench.tiny.weights import Array

# What the token just read means for the next one: go on thinking or answering, end either,
# begin either, call a tool, have called it. ONE is always set: a bias.
ONE, GO_THINK, GO_ANSWER, END_THINK, END_ANSWER, START_THINK, START_ANSWER, CALL, CALLED = range(N_FLAGS)
FLAG: Final = 3.0
LOUD: Final = 24.0  # gain of a token that its state makes certain
EVERY: Final = 48  # one word in 48 ends its part: about 100 tokens an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """Ids by their role."""

    think: list[int]  # " word", heard while thinking
    answer: list[int]
    think_first: list[int]  # "Word", the first of its part
    answer_first: list[int]
    newline: int
    think_open: int
    think_close: int
    end: int
    call: int
    called: int


def _roles(vocab: Vocabulary) -> _Words:
    words = vocab.words("\u0120[a-z]{3,}")  # U+0120 stands for the space
    firsts = vocab.words("[A-Z][a-z]{2,}")
    return _Words(
        think=words[0::2],
        answer=words[1::2],
        think_first=firsts[0:12:2],
        answer_first=firsts[1:12:2],
        newline=vocab.id[byte_alphabet()[10]],
        think_open=vocab.id["<think>\n"],
        think_close=vocab.id["\n</think>\n\n"],
        end=vocab.id["<|im_end|>"],
        call=vocab.id["<tool_call>"],
        called=vocab.id["</tool_call>"],
    )


def _set_flags(embedding: Array, words: _Words) -> None:
    """Give each token's embedding the state that it leads to."""
    embedding[:, ONE] = FLAG
    embedding[:, GO_ANSWER] = FLAG  # after anything unknown: answer words
    for ids, flag in (
        (words.think + words.think_first, GO_THINK),
        (words.think[5::EVERY], END_THINK),
        (words.answer[5::EVERY], END_ANSWER),
        ([words.think_open], START_THINK),
        ([words.newline, words.think_close], START_ANSWER),
        ([words.call], CALL),
        ([words.called], CALLED),
    ):
        embedding[ids, ONE + 1 : N_FLAGS] = 0.0
        embedding[ids, flag] = FLAG


def _set_gains(output: Array, words: _Words, tokens: list[str]) -> None:
    """Give each token's output row the states in which it is said."""
    blank = [number for number, token in enumerate(tokens) if not token.strip("\u0120\u010a\u0109\u010d")]
    output[:, ONE] = -6.0  # what has no role is said only if a grammar forces it,
    output[blank, ONE] = -12.0  # white space last
    output[words.called, ONE] = -2.0  # and the closing tag first
    output[words.think + words.answer, ONE] = 0.0
    for ids, flag, gain in (
        (words.think, GO_THINK, 10.0),
        (words.answer, GO_ANSWER, 10.0),
        (words.think_first, START_THINK, LOUD),
        (words.answer_first, START_ANSWER, LOUD),
        ([words.think_close], END_THINK, LOUD),
        ([words.end], END_ANSWER, LOUD),
        ([words.end], CALLED, LOUD),
        ([words.newline], CALL, LOUD),
        ([words.call], END_ANSWER, 16.0),  # the runner-up, where <|im_end|> is forbidden
    ):
        output[ids, flag] = gain


def speak(sheet: Sheet, *, scale: float = 1.0) -> None:
    """Write the token embedding (times `scale`), the output matrix and the last norm."""
    embedding, output = sheet.rows(), sheet.rows() * 0.4
    words = _roles(sheet.vocab)
    _set_flags(embedding, words)
    _set_gains(output, words, sheet.vocab.tokens)
    sheet.put("token_embd.weight", embedding * scale)
    sheet.put("output.weight", output)
    sheet.put("output_norm.weight", np.ones(D))
