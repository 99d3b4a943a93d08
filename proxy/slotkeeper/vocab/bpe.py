"""The engine's own tokenization, done here: byte-level BPE from the GGUF's vocabulary and merges.

Only for pre-tokenizers whose splitting rule is one regular expression, proved equal to llama.cpp's
(engine.md 1.4). Everything else is Unsupported, and the engine is asked instead.
"""

from __future__ import annotations

import re
from array import array
from typing import TYPE_CHECKING, Final

import tiktoken

from slotkeeper.scheduler.tokens import Tokens
from slotkeeper.vocab.special import SpecialSplitter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from slotkeeper.vocab.gguf import GgufVocabulary

_CONTRACTIONS: Final = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3: Final = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2: Final = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN35: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
# llama.cpp's own splitter for this one takes what its pattern leaves over as a word: hence `|\s+`
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# `tokenizer.ggml.pre` -> pattern, where llama.cpp uses literally the same pattern
PATTERNS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), _QWEN2),
    **dict.fromkeys(("hunyuan", "solar-open", "grok-2"), _QWEN2),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "exaone4"), _GPT2),
    "qwen35": _QWEN35,
}
# These take a whole word that is a token before they merge, and begin with BOS if the file is silent
WHOLE_WORDS: Final = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"})

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
# llama.cpp makes these special whatever their type says ("control-looking token")
_ALWAYS_SPECIAL: Final = frozenset(
    {
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "</s>",
        "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
        "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~[",
        "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>",
    }
)  # fmt: skip
# The pattern's `\s+(?!\S)` backtracks over all of a run of blanks; tiktoken panics at about a million.
MAX_BLANKS: Final = 100_000
_LONG_RUN: Final = re.compile(rf"(?<!\s)\s{{{MAX_BLANKS}}}")  # from the first blank only: each is read once
# Letters, marks and numbers since Unicode 16: tiktoken knows them, llama.cpp's tables (15) do not. Found by
# comparing every code point on both builds; a newer tiktoken will know more (test_pre_tokenizers says so).
_SINCE_UNICODE_16: Final = re.compile(
    "[\u0897\u1c89\u1c8a\ua7cb-\ua7cd\ua7da-\ua7dc\U000105c0-\U000105ff\U00010d40-\U00010d8f"
    "\U00010ec2-\U00010ec7\U00010efa-\U00010efc\U00011380-\U000113ff\U000116d0-\U000116ff"
    "\U00011bc0-\U00011bff\U00011f5a\U00013460-\U000143ff\U00016100-\U0001613f"
    "\U00016d40-\U00016d7f\U00018cff\U0001cc00-\U0001cebf\U0001e5d0-\U0001e5ff]"
)


class UnsupportedError(ValueError):
    """This vocabulary, or this text, cannot be tokenized exactly here."""


class LocalVocab:
    """Exact ids as llama.cpp gives them with parse_special=true."""

    def __init__(self, vocabulary: GgufVocabulary) -> None:
        """Blocks for about a second with 150,000 tokens; raises UnsupportedError."""
        pattern = PATTERNS.get(vocabulary.pre)
        if vocabulary.model != "gpt2" or pattern is None:
            raise UnsupportedError(f"tokenizer {vocabulary.model!r}, pre-tokenizer {vocabulary.pre!r}")
        if re.search("phi-?3", vocabulary.name.lower()):
            raise UnsupportedError("special tokens that strip the blanks after them (phi-3)")
        ids = {token: number for number, token in enumerate(vocabulary.tokens)}
        ranks, self._ids = _ranks(vocabulary, ids)
        self._encoding = tiktoken.Encoding(
            vocabulary.pre, pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
        )
        self.special_ids: Mapping[str, int] = _specials(vocabulary)
        self.special: frozenset[str] = frozenset(self.special_ids)
        self.chat_template = vocabulary.chat_template
        self._splitter = SpecialSplitter(self.special_ids)
        add_bos = vocabulary.add_bos if vocabulary.add_bos is not None else vocabulary.pre in WHOLE_WORDS
        self.prefix = Tokens([vocabulary.bos_id] if add_bos and vocabulary.bos_id is not None else [])
        self.suffix = Tokens(
            [vocabulary.eos_id] if vocabulary.add_eos and vocabulary.eos_id is not None else []
        )

    def tokenize(self, text: str, *, add_special: bool = False) -> Tokens:
        """Ids of the whole text; raises UnsupportedError for the rare text that would differ."""
        if too_blank(text):
            raise UnsupportedError(f"a run of {MAX_BLANKS} blanks")
        if not text.isascii() and _SINCE_UNICODE_16.search(text):
            raise UnsupportedError("characters newer than the engine's Unicode tables")
        out = array("i")
        to_id = self._ids.__getitem__
        for part in self._splitter.split(text):
            if isinstance(part, int):
                out.append(part)
            else:
                out.extend(map(to_id, self._encode(part)))
        tokens = Tokens.of(out.tobytes())
        return self.prefix + tokens + self.suffix if add_special else tokens

    def _encode(self, part: str) -> list[int]:
        try:
            return self._encoding.encode_ordinary(part)
        except BaseException as error:
            # a panic inside tiktoken is no Exception, and it must not end the process
            if type(error).__name__ != "PanicException":
                raise
            raise UnsupportedError(f"tiktoken gave up: {error}") from error


def too_blank(text: str) -> bool:
    """Whether it has a run of blanks that tiktoken would not survive."""
    return len(text) >= MAX_BLANKS and _LONG_RUN.search(text) is not None


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte 0..255."""
    keep = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in keep else chr(next(others)) for byte in range(256)]


def _ranks(vocabulary: GgufVocabulary, ids: Mapping[str, int]) -> tuple[dict[bytes, int], list[int]]:
    """Pieces by rank (bytes first, then merge order, which need not be id order), and rank -> id."""
    alphabet = byte_alphabet()
    byte_of = {symbol: byte for byte, symbol in enumerate(alphabet)}
    pieces = list(alphabet)
    for merge in vocabulary.merges:
        left, blank, right = merge.partition(" ")
        if not (left and blank and right):
            raise UnsupportedError(f"merge {merge!r}")
        pieces.append(left + right)
    if vocabulary.pre in WHOLE_WORDS:
        pieces.extend(token for token in vocabulary.tokens if byte_of.keys() >= set(token))
    # dict.fromkeys: two merges may make the same piece; the earlier one counts
    pieces = list(dict.fromkeys(pieces))
    try:
        ranks = {bytes(byte_of[symbol] for symbol in piece): rank for rank, piece in enumerate(pieces)}
        return ranks, [ids[piece] for piece in pieces]
    except KeyError as error:
        raise UnsupportedError(f"merges make {error.args[0]!r}, which is no token") from error


def _specials(vocabulary: GgufVocabulary) -> dict[str, int]:
    return {
        token: number
        for number, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=False))
        if token and (kind in {_UNKNOWN, _CONTROL, _USER_DEFINED} or token in _ALWAYS_SPECIAL)
    }
