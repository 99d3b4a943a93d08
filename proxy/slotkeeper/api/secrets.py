"""Credentials of a request where they do not belong: in an id, a name, a User-Agent, a body.

Some clients call their session, or themselves, by their key. What is written down of a request, in a log, in
the journal, in a metric or in a recording, holds none of its own credentials, and nothing that looks like a
key of another client.
"""

from __future__ import annotations

import re
from binascii import Error, a2b_base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Self
from urllib.parse import parse_qsl

from multidict import CIMultiDict

NAMES: Final = ("auth", "cookie", "key", "secret", "token", "password")  # in the name of what holds one
LEAST: Final = 12  # characters; what is shorter may be a part of any word, and is sought as a whole word only
LONGEST: Final = 64  # characters of a name of which the answer is kept
MASK: Final = "***"
# Keys of OpenAI, Anthropic, Hugging Face, GitHub, Slack; and signed tokens.
_SHAPED: Final = re.compile(
    r"\b(?:(?:sk|pk|hf|gh[oprsu]|github_pat|xox[a-z])[-_][\w-]{16,}|(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Secrets:
    """Those of one request."""

    words: frozenset[str]

    @classmethod
    def of(cls, headers: Mapping[str, str], query: str = "") -> Self:
        """Every value of a header, or of a field of the query, whose name sounds like a credential's."""
        found = [word for name, value in headers.items() if tells_secret(name) for word in _words(value)]
        if query and tells_secret(query):
            found += [value for name, value in parse_qsl(query) if tells_secret(name)]
        return cls(frozenset(found))

    def stand_in(self, text: str) -> bool:
        """Whether a text must not be written down."""
        whole = text.split()
        own = any(word in (text if len(word) >= LEAST else whole) for word in self.words)
        return own or _SHAPED.search(text) is not None

    def without(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        """The headers less those in which a secret stands under a name that does not say so."""
        open_ = [(name, value) for name, value in headers.items() if not tells_secret(name)]
        if not self.stand_in("\n".join([value for _, value in open_])):  # of nearly every request, at once
            return headers
        left = CIMultiDict(headers)
        for name in {name for name, value in open_ if self.stand_in(value)}:
            left.popall(name)
        return left

    def masked(self, data: bytes) -> bytes:
        """A body with its own request's credentials made unreadable. As JSON it stays what it was."""
        for word in self.words:
            if len(word) >= LEAST:
                data = data.replace(word.encode(errors="replace"), MASK.encode())
        return data


def tells_secret(name: str) -> bool:
    """Whether something that is called so holds a credential."""
    return _known(name) if len(name) <= LONGEST else _tells(name)


def _tells(name: str) -> bool:
    lower = name.lower()
    return any(part in lower for part in NAMES)


_known = lru_cache(maxsize=512)(_tells)  # asked three times of each header of every request


def masked(text: str) -> str:
    """A text of unknown origin, with whatever looks like a key made unreadable."""
    return _SHAPED.sub(MASK, text)


def _words(value: str) -> Iterator[str]:
    """The secret parts of a header: not the scheme before a key, nor the name of a cookie."""
    words = value.replace(";", " ").split()
    scheme = words.pop(0).lower() if len(words) > 1 and words[0].isalpha() else ""
    for word in words:
        name, _, cookie = word.rstrip("=").partition("=")
        if not cookie or len(cookie) >= LEAST:  # a short cookie is a preference
            yield cookie or name
    if scheme == "basic":
        yield from _password(words[0])


def _password(basic: str) -> Iterator[str]:
    try:
        password = a2b_base64(basic.encode(errors="replace")).decode(errors="replace").partition(":")[2]
    except Error:
        return
    if password:
        yield password
