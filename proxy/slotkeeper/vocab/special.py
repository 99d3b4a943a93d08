r"""Finding special tokens in a text exactly as llama.cpp does.

llama.cpp takes the specials one by one, longest first (in bytes), and cuts each out of what is still
text. A regular expression takes them left to right. The two differ only where matches overlap
("<think>\n" and "\n</think>" in "<think>\n</think>"), so only there the slow way is taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping


class SpecialSplitter:
    """Splits a text into text between specials (str) and specials (their id)."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        self._longest_first = sorted(ids, key=lambda token: -len(token.encode()))
        self._any = alternatives(ids)
        self._entangled = entangled(ids)

    def split(self, text: str) -> list[str | int]:
        """Return the parts in order; no part is an empty string."""
        if self._any is None:
            return [text] if text else []
        parts: list[str | int] = []
        done, at = 0, 0
        while match := self._any.search(text, at):
            start, at = match.span()
            if start > done:
                parts.append(text[done:start])
            if match.group() in self._entangled:
                at = self._cluster_end(text, start, at)
                parts += self._partition(text[start:at], self._longest_first)
            else:
                parts.append(self._ids[match.group()])
            done = at
        if done < len(text):
            parts.append(text[done:])
        return joined(parts)

    def _cluster_end(self, text: str, start: int, end: int) -> int:
        """Where the run of matches that overlap, beginning at `start`, ends."""
        at = start + 1
        while at < end:
            if self._any and (match := self._any.match(text, at)):
                end = max(end, match.end())
            at += 1
        return end

    def _partition(self, text: str, tokens: list[str]) -> list[str | int]:
        for number, token in enumerate(tokens):
            if token not in text:
                continue
            parts: list[str | int] = []
            rest = tokens[number + 1 :]
            for index, piece in enumerate(text.split(token)):
                if index:
                    parts.append(self._ids[token])
                parts += self._partition(piece, rest) if piece else []
            return parts
        return [text]


def joined(parts: Iterable[str | int]) -> list[str | int]:
    """The same parts with neighbouring texts made one: a cluster may end in the middle of a text."""
    whole: list[str | int] = []
    for part in parts:
        if isinstance(part, str) and whole and isinstance(whole[-1], str):
            whole[-1] += part
        else:
            whole.append(part)
    return whole


def alternatives(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that finds the leftmost special, the longest where several begin; None if there is none."""
    ordered = sorted(filter(None, tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def entangled(tokens: Iterable[str]) -> frozenset[str]:
    """The tokens whose match another match can overlap from inside and reach beyond."""
    tokens = list(tokens)
    by_first: dict[str, list[str]] = {}
    for token in tokens:
        by_first.setdefault(token[:1], []).append(token)
    return frozenset(
        token
        for token in tokens
        if any(
            other.startswith(token[at:]) and len(other) > len(token) - at
            for at in range(1, len(token))
            for other in by_first.get(token[at], ())
        )
    )


def independent(candidates: Iterable[str], specials: Iterable[str]) -> list[str]:
    """Those candidates at which a text may be cut before anything else: no other special overlaps them.

    One that lies inside a candidate does not matter: the longer is taken first.
    """
    specials = list(specials)
    return [
        candidate
        for candidate in candidates
        if not any(_reaches_over(special, candidate) for special in specials if special != candidate)
    ]


def _reaches_over(special: str, cut: str) -> bool:
    return (
        cut in special
        or any(special.startswith(cut[at:]) for at in range(1, len(cut)))
        or any(cut.startswith(special[at:]) for at in range(1, len(special)))
    )
