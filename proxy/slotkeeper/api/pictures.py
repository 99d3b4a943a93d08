"""Images in chats: each image is taken out of its chat and replaced by a name, the digest of its bytes.

The engine's template puts the same marker in place of every image. So a chat with names in place of images
renders to the same text and takes only a few kilobytes. Chats with other media (audio, images given by http
or file URL) are not supported: Slotkeeper never fetches anything.
"""

from __future__ import annotations

import binascii
import re
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final

from slotkeeper.api.document import Doc, rows, table, text

_TYPE: Final = "image_url"
PIECE_CHARACTERS: Final = 1 << 20  # of an image in base64, decoded at once; a multiple of four
_BEFORE: Final = re.compile(r"data:image/[\w.+-]+;base64,", re.ASCII)
_NAMED: Final = "data:image/png;base64,"  # precedes a name; the template does not read it
_TEXTS: Final = frozenset({"text", "refusal"})


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Picture:
    """An image that a client sent."""

    digest: bytes  # SHA-256 of the image's bytes
    data: str = field(repr=False)  # the image's bytes in base64


def with_names(chat: Doc | None) -> tuple[Doc | None, tuple[Picture, ...]]:
    """Return the chat with names for its images, and the images; (None, ()) for None or other media."""
    if chat is None:
        return None, ()
    pictures: dict[bytes, Picture] = {}
    messages: list[Doc] = []
    for message in chat["messages"]:
        content = message.get("content")
        if isinstance(content, list):
            parts = [_named(part, pictures) for part in content]
            if None in parts:
                return None, ()
            messages.append({**message, "content": parts})
        else:
            messages.append(message)
    return {**chat, "messages": messages}, tuple(pictures.values())


def _named(part: Any, pictures: dict[bytes, Picture]) -> Doc | None:
    """Return a text part, or the name of an image, which is added to `pictures`; None for other media."""
    if not isinstance(part, dict) or text(part, "type") != _TYPE:
        return part if isinstance(part, dict) and text(part, "type") in _TEXTS else None
    url = text(table(part, _TYPE), "url")
    before = _BEFORE.match(url)
    if before is None:
        return None
    data = url[before.end() :]
    digest = _digest(data)
    if digest is None:
        return None
    pictures[digest] = Picture(digest, data)
    return part_of(digest)


def _digest(data: str) -> bytes | None:
    """Return the digest of the bytes that `data` encodes; None if the engine may decode it to other bytes.

    It is decoded in pieces, between which other threads run.
    """
    digest, decoded = sha256(), 0
    try:
        for start in range(0, len(data), PIECE_CHARACTERS):
            piece = binascii.a2b_base64(data[start : start + PIECE_CHARACTERS], strict_mode=True)
            digest.update(piece)
            decoded += len(piece)
    except (binascii.Error, ValueError):
        return None
    whole = decoded == len(data) // 4 * 3 - data[-2:].count("=")  # there is padding only at the end
    return digest.digest() if whole and decoded else None


def part_of(digest: bytes) -> Doc:
    """Return a message part that names the image of this digest."""
    return {"type": _TYPE, _TYPE: {"url": _NAMED + b64encode(digest).decode()}}


def digests(chat: Doc) -> list[bytes]:
    """Return the digests of the images that a chat names, in order."""
    return [
        b64decode(text(table(part, _TYPE), "url").removeprefix(_NAMED))
        for message in chat["messages"]
        for part in rows(message.get("content"))
        if part.get("type") == _TYPE
    ]


def with_images(chat: Doc, picture: Callable[[bytes], Picture]) -> Doc:
    """Return the chat with images in place of their names."""

    def part(given: Doc) -> Doc:
        if given.get("type") != _TYPE:
            return given
        (digest,) = digests({"messages": [{"content": [given]}]})
        return {"type": _TYPE, _TYPE: {"url": _NAMED + picture(digest).data}}

    return {
        **chat,
        "messages": [
            {**message, "content": [part(p) for p in message["content"]]} for message in chat["messages"]
        ],
    }
