"""The manifest of a snapshot: a JSON object beside the slot file, which says what that file must be.

It is written last, read strictly and sealed with a secret. It holds no tokens, as that would store the prompt
a second time: the slot file's header has them, and the hash chain here shows whether they are the right ones.
The secret is a file in the folder, readable by its owner only, and moves with the folder. Folders of earlier
releases have none: their manifests, sealed with a public digest, are sealed anew once (see `taken_over`).
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import orjson

from slotkeeper import system
from slotkeeper.scheduler.policies.adapters import space_of
from slotkeeper.scheduler.prompts.tokens import WIDTH, Chunk, Tokens
from slotkeeper.scheduler.slots.engine_model import SnapshotId
from slotkeeper.store import files
from slotkeeper.store.files import MANIFEST, ours

BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Seal:
    """The secret of a folder, which distinguishes its own manifests from foreign ones."""

    secret: bytes
    takes_over: bool  # whether manifests of releases that had no secret are accepted


def seal_of(folder: Path) -> Seal:
    """Return the folder's seal; make one if there is none. May raise OSError.

    A new secret has another file name until `taken_over`, so that a sidecar that is killed before it
    continues with the same secret.
    """
    for name, takes_over in ((files.SEAL, False), (files.FIRST_SEAL, True)):
        secret = _read(folder / name)
        if secret is not None:
            return Seal(secret, takes_over)
    secret = secrets.token_bytes(BYTES)
    files.write_small(folder / files.FIRST_SEAL, folder / files.new_temporary(time.time()), secret)
    return Seal(secret, takes_over=True)


def taken_over(folder: Path, seal: Seal) -> Seal:
    """Finish the take-over, once all manifests have this seal: from then on others are not accepted."""
    if seal.takes_over:
        (folder / files.FIRST_SEAL).replace(folder / files.SEAL)
        system.sync_folder(folder)
    return Seal(seal.secret, takes_over=False)


def _read(path: Path) -> bytes | None:
    """Return the secret in a file; None if there is no such file, or if it has the wrong size.

    Raises OSError, also if the file belongs to another user.
    """
    try:
        file = files.open_ours(path)
    except FileNotFoundError:
        return None
    with file:
        found = os.fstat(file.fileno())
        us = system.user()
        if us is not None and found.st_uid not in {0, us}:
            raise OSError(errno.EPERM, "it belongs to another user", str(path))
        if stat.S_IMODE(found.st_mode) & 0o077 and found.st_uid == us:  # fsGroup does it
            system.make_private(file.fileno())
        secret = file.read(BYTES + 1)
    return secret if len(secret) == BYTES else None


# -- the manifest ----------------------------------------------------------------------------------------

FORMAT: Final = 2
UNKEYED: Final = 1  # sealed with a digest that needs no secret
BLOCK: Final = 256  # tokens for each digest of the chain
LINK_BYTES: Final = 8  # bytes of each digest; the file's own hash guards against tampering
LONGEST_NAMESPACE: Final = 64  # characters
LONGEST_ADAPTERS: Final = 4096  # characters: a hundred adapters at once
LATEST: Final = 253402300799.0  # seconds, the last of the year 9999: no clock shows a later time
LARGEST: Final = 4 << 20  # bytes: a million tokens make 80 kB
TEXTS: Final = frozenset({"namespace", "adapters"})
OPTIONAL: Final = TEXTS | {"images"}  # fields that are written only if there is something
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_LINK: Final = re.compile(rf"[0-9a-f]{{{2 * LINK_BYTES}}}")


Image = tuple[int, int, str]  # tokens before it, its tokens, the digest of its bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All facts about a slot file that are known without opening it.

    `build` is only information: whether a file fits an engine depends on `fingerprint`.
    """

    id: SnapshotId
    fingerprint: str  # of the engine (engine.md 2.4)
    version: int  # of the engine's file format (engine.md 2.2)
    layout: str  # digest of the state's structure; empty = not understood
    tokens: int
    chain: tuple[str, ...]
    checkpoints: tuple[int, ...]
    draft: bool
    repaired: bool
    golden: bool
    size: int  # bytes
    sha256: str
    created: float  # wall clock, seconds
    build: str
    namespace: str = ""  # of the key whose state this is; not written if namespaces were off
    adapters: str = ""  # with which LoRA adapters it was computed; not written if the engine had none
    images: tuple[Image, ...] = ()  # the images in its prompt; not written if there are none

    @property
    def space(self) -> str:
        """The space (namespace and adapters) within which its state may be reused."""
        return space_of(self.namespace, self.adapters)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return tuple(Chunk(start, length, bytes.fromhex(digest)) for start, length, digest in self.images)

    def fits(self, tokens: Tokens) -> bool:
        """Whether these are the tokens of the snapshot."""
        return len(tokens) == self.tokens and chain(tokens) == self.chain


class Flaw(StrEnum):
    """Why a manifest is not accepted."""

    NOT_JSON = "it is not a JSON object"
    NEWER = "a later release wrote it"
    FIELDS = "fields are missing, unknown or of the wrong kind"
    VALUES = "a value is impossible"
    SEAL = "it was changed after it was written, or written elsewhere"
    FOREIGN = "it is the manifest of another file"


def chain(tokens: Tokens) -> tuple[str, ...]:
    """Return a digest for each block of 256 ids (the last may be shorter), over all ids up to its end."""

    def links() -> Iterator[str]:
        link = b""
        for start in range(0, len(tokens.packed), BLOCK * WIDTH):
            block = tokens.packed[start : start + BLOCK * WIDTH]
            link = hashlib.blake2b(block, key=link, digest_size=LINK_BYTES).digest()
            yield link.hex()

    return tuple(links())


def encode(manifest: Manifest, secret: bytes) -> bytes:
    """Return the manifest as sealed JSON. `secret` is the folder's (see `Seal`)."""
    body = {"format": FORMAT} | asdict(manifest)
    for name in OPTIONAL:
        if not body[name]:
            del body[name]
    return orjson.dumps(
        body | {"seal": _seal(body, secret)}, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS
    )


def decode(data: bytes, expected: SnapshotId, secret: bytes, *, unkeyed: bool = False) -> Manifest | Flaw:
    """Read a manifest that `encode` wrote for `expected`; return a flaw for anything else. Never raises.

    With `unkeyed` manifests of releases that had no secret are accepted too.
    """
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError:
        return Flaw.NOT_JSON
    if not isinstance(body, dict):
        return Flaw.NOT_JSON
    written = body.get("format")
    if type(written) is int and written > FORMAT:
        return Flaw.NEWER
    old = unkeyed and written == UNKEYED
    if not _sealed(body, body.pop("seal", None), secret, old=old):
        return Flaw.SEAL
    if type(written) is not int or body.pop("format") != (UNKEYED if old else FORMAT) or not _shaped(body):
        return Flaw.FIELDS
    lists = {name: tuple(body[name]) for name in ("chain", "checkpoints")}
    lists["images"] = tuple(tuple(image) for image in body.get("images", ()))
    manifest = Manifest(**(body | lists))
    if manifest.id != expected:
        return Flaw.FOREIGN
    return manifest if possible(manifest) else Flaw.VALUES


def _sealed(body: dict[str, Any], seal: Any, secret: bytes, *, old: bool) -> bool:
    try:
        fitting = _digest_of(body) if old else _seal(body, secret)
    except orjson.JSONEncodeError:  # nested deeper than orjson writes
        return False
    return isinstance(seal, str) and hmac.compare_digest(seal.encode(errors="replace"), fitting.encode())


def _seal(body: dict[str, Any], secret: bytes) -> str:
    """Return the seal over all other fields: a changed fingerprint would load a file into a wrong engine."""
    return hmac.digest(secret, orjson.dumps(body, option=orjson.OPT_SORT_KEYS), "sha256").hex()


def _digest_of(body: dict[str, Any]) -> str:
    return hashlib.sha256(orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).hexdigest()


_KINDS: Final[dict[str, type]] = {
    **dict.fromkeys(("id", "fingerprint", "layout", "sha256", "build"), str),
    **dict.fromkeys(("version", "tokens", "size"), int),
    **dict.fromkeys(("draft", "repaired", "golden"), bool),
    **dict.fromkeys(("chain", "checkpoints"), list),
    "created": float,
}


def _shaped(body: dict[str, Any]) -> bool:
    if any(type(body.get(name, "")) is not str for name in TEXTS) or body.keys() - OPTIONAL != _KINDS.keys():
        return False
    if type(images := body.get("images", [])) is not list or not all(map(_shaped_image, images)):
        return False
    if any(type(body[name]) is not kind for name, kind in _KINDS.items()):
        return False
    return {*map(type, body["chain"])} <= {str} and {*map(type, body["checkpoints"])} <= {int}


def _shaped_image(image: Any) -> bool:
    return type(image) is list and [type(value) for value in image] == [int, int, str]


def possible(manifest: Manifest) -> bool:
    """Whether all values are plausible, so that `decode` accepts the manifest."""
    return (
        ours(manifest.id + MANIFEST) is not None
        and len(manifest.namespace) <= LONGEST_NAMESPACE
        and len(manifest.adapters) <= LONGEST_ADAPTERS
        and bool(manifest.fingerprint)
        and 0.0 <= manifest.created <= LATEST
        and bool(_DIGEST.fullmatch(manifest.sha256))
        and _possible_tokens(manifest)
    )


def _possible_tokens(manifest: Manifest) -> bool:
    cuts = manifest.checkpoints
    return (
        manifest.tokens > 0
        and manifest.size > manifest.tokens * WIDTH
        and len(manifest.chain) == -(-manifest.tokens // BLOCK)
        and all(_LINK.fullmatch(link) for link in manifest.chain)
        and all(a <= b for a, b in pairwise((0, *cuts, manifest.tokens)))
        and all(
            0 <= start < start + length <= manifest.tokens and _DIGEST.fullmatch(digest)
            for start, length, digest in manifest.images
        )
    )
