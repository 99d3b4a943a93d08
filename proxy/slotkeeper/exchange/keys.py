"""The sidecar's API keys (`--keys-file`): which clients are served, what each may do, and its limits.

The file is TOML, one table for each key. Keys are compared by keyed digests, so that the time of a look-up
reveals nothing about them, and no key is kept in memory. A key's usage survives a reload of the file.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import re
import secrets
import shlex
import stat
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from math import ceil
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from slotkeeper import system
from slotkeeper.api.errors import ClientFault
from slotkeeper.observe.log import get_logger
from slotkeeper.scheduler.types import Crowded, Priority

LARGEST: Final = 2**20  # bytes of the file
SHORTEST: Final = 16  # characters of a key, so that it cannot be found by trying
MINUTE: Final = 60.0
RETRY_AFTER: Final = 2  # seconds until one of several requests may have ended
RELEASE_SECONDS: Final = 5.0  # for which a request waits until engines release slots whose clients left
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
PREFIX: Final = "sk-slotkeeper-"  # secret scanners recognise our keys by it

log = get_logger(__name__)


class KeysError(Exception):
    """The file cannot be used; the message says what to do and contains no key."""


class _Table(BaseModel):
    """The fields of one key's table in the file."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    key: SecretStr | None = Field(None, min_length=SHORTEST)
    sha256: str | None = Field(None, pattern="^[0-9a-f]{64}$")
    namespace: str = Field("", pattern=f"^({NAME.pattern})?$")
    operator: bool = False
    concurrent: int | None = Field(None, ge=1)
    queued: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    priority: Literal["high", "normal", "low"] = "high"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of the file and the rights and limits of its client; None: no limit."""

    name: str
    sha256: bytes
    namespace: str  # keys with the same namespace share cached prefixes and snapshots
    operator: bool = False  # may use every route of the engine
    concurrent: int | None = None  # requests that run or wait at once
    queued: int | None = None  # requests that wait for a slot at once
    tokens_per_minute: int | None = None  # tokens computed or generated
    priority: Priority = Priority.HIGH  # a more urgent request counts as this

    @property
    def limited(self) -> bool:
        limits = (self.concurrent, self.queued, self.tokens_per_minute)
        return any(limit is not None for limit in limits)


class KeyList:
    """The keys of the file as it was when it was read."""

    def __init__(self, keys: Mapping[str, Key]) -> None:
        self._salt = secrets.token_bytes(32)
        self._by_digest = {self._keyed(key.sha256): key for key in keys.values()}

    def __len__(self) -> int:
        return len(self._by_digest)

    def find(self, given: str) -> Key | None:
        digest = _sha256(given)
        found = self._by_digest.get(self._keyed(digest))
        return found if found and hmac.compare_digest(found.sha256, digest) else None

    @property
    def names(self) -> frozenset[str]:
        return frozenset(key.name for key in self._by_digest.values())

    def _keyed(self, digest: bytes) -> bytes:
        return blake2b(digest, key=self._salt, digest_size=16).digest()

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file. Raises KeysError."""
        try:
            with path.open("rb") as file:
                found, data = os.fstat(file.fileno()), file.read(LARGEST + 1)
        except OSError as error:
            raise KeysError(f"{path}: {error.strerror or error}") from None
        if len(data) > LARGEST:
            raise KeysError(f"{path} is larger than {LARGEST >> 20} MiB")
        tables = _tables(path, data)
        if wrong := _exposed(path, found, plain=any(table.key for table in tables.values())):
            raise KeysError(wrong)
        keys = {name: _key(name, table) for name, table in tables.items()}
        if len({key.sha256 for key in keys.values()}) < len(keys):
            raise KeysError(f"{path}: two names have the same key; give each its own")
        if not keys:
            raise KeysError(f"{path} names no key; `slotkeeper keys NAME` prints one to put there")
        return cls(keys)


@dataclass(slots=True)
class Used:
    """The usage of one key."""

    running: int = 0  # requests of clients that wait or read
    leaving: int = 0  # requests whose clients left, and for which an engine still works
    room: asyncio.Event = field(default_factory=asyncio.Event)  # set when `leaving` falls
    owed: float = 0.0  # tokens used under a limit; each minute subtracts tokens_per_minute from it
    at: float = 0.0  # seconds on the caller's clock: when `owed` was last brought up to date

    def owes(self, tokens_per_minute: int, now: float) -> float:
        self.owed = max(0.0, self.owed - (now - self.at) * tokens_per_minute / MINUTE)
        self.at = now
        return self.owed

    def crowded(self, key: Key, now: float) -> Crowded | None:
        """Return the limit that forbids another request; None if it is allowed."""
        if key.concurrent is not None and self.running >= key.concurrent:
            return Crowded.KEY_CONCURRENT
        limit = key.tokens_per_minute
        if limit is not None and self.owes(limit, now) >= limit:
            return Crowded.KEY_TOKENS
        return None

    def wait(self, key: Key) -> int:
        """Return the seconds until the key owes fewer tokens than its limit for a minute."""
        limit = key.tokens_per_minute or 1
        return max(1, ceil((self.owed - limit) * MINUTE / limit + 0.001))


class OwnKeys:
    """The current list of keys and their usage."""

    def __init__(self, path: Path, *, now: Callable[[], float] = time.monotonic) -> None:
        """Read the file. Raises KeysError."""
        self.path = path
        self._now = now
        self._list = KeyList.read(path)
        self._used: dict[str, Used] = {}

    def __repr__(self) -> str:
        return f"<OwnKeys {self.path} {len(self._list)} keys>"

    def reload(self) -> None:
        """Read the file again. Raises KeysError; then the keys stay as they were."""
        self._list = KeyList.read(self.path)
        now = self._list.names
        self._used = {
            name: used for name, used in self._used.items() if name in now or used.running or used.leaving
        }
        log.info("keys_read", file=str(self.path), keys=len(self._list))

    def find(self, given: str) -> Key | None:
        return self._list.find(given)

    async def admit(self, key: Key) -> Counted:
        """Count a new request of this key; the result must be closed. Raises CrowdedFault at a limit.

        If only requests whose clients have left are in its way, it waits for the engine to release one: an
        engine notices within about a second that a client has left (engine.md T10).
        """
        used = self.begin(key)
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                while key.concurrent is not None and used.running + used.leaving > key.concurrent:
                    used.room.clear()
                    await used.room.wait()
        except TimeoutError:
            used.running -= 1
            raise _too_many(key) from None
        except asyncio.CancelledError:
            used.running -= 1
            raise
        return Counted(self, key, used)

    def begin(self, key: Key) -> Used:
        """Count a new request of this key; `end` must follow. Raises CrowdedFault if its limits forbid it."""
        used = self._used.setdefault(key.name, Used(at=self._now()))
        match used.crowded(key, self._now()):
            case Crowded.KEY_CONCURRENT:
                raise _too_many(key)
            case Crowded.KEY_TOKENS as reason:
                raise CrowdedFault(
                    reason,
                    f"this key has used its {key.tokens_per_minute} tokens of a minute; try again later",
                    used.wait(key),
                )
        used.running += 1
        return used

    def end(self, key: Key, used: Used, tokens: int) -> None:
        """Count the end of a request for which the engine computed and generated `tokens`."""
        used.running -= 1
        self.charge(key, used, tokens)

    def charge(self, key: Key, used: Used, tokens: int) -> None:
        """Count tokens that the engine computed and generated for a key with a limit of tokens.

        A key without one owes nothing if a later list gives it one.
        """
        if key.tokens_per_minute is not None:
            used.owes(key.tokens_per_minute, self._now())
            used.owed += tokens


class Counted:
    """One request of a key. It counts until its answer has ended, or an engine has released its slot."""

    def __init__(self, keys: OwnKeys, key: Key, used: Used) -> None:
        self._keys, self._key, self._used = keys, key, used
        self._waits: Callable[[Callable[[int | None], None]], None] | None = None
        self._rest: Callable[[int | None], int] = lambda _: 0
        self.cost = 0  # tokens computed and generated for it, as far as they are known

    def stays(
        self, waits: Callable[[Callable[[int | None], None]], None], rest: Callable[[int | None], int]
    ) -> None:
        """Count the request beyond `close`, because its client left while an engine works for it.

        `waits` calls its argument when the engine has released the slot, with the tokens that the slot held
        then. `rest` returns how many of these are not in `cost`.
        """
        self._waits, self._rest = waits, rest

    def close(self) -> None:
        self._keys.end(self._key, self._used, self.cost)
        if self._waits is not None:
            self._used.leaving += 1
            self._waits(self._released)

    def _released(self, held: int | None) -> None:
        self._used.leaving -= 1
        self._used.room.set()
        self._keys.charge(self._key, self._used, self._rest(held))


CROWDED: Final = {
    Crowded.ALL: "too many requests wait for a slot; try again later",
    Crowded.CLIENT: "too many of your requests wait; try again later",
    Crowded.KEY_QUEUED: "too many requests of this key wait for a slot; try again later",
}


class CrowdedFault(ClientFault):
    """A limit of a key, of a client or of the whole queue is reached: 429."""

    default_status = 429

    def __init__(self, reason: Crowded, message: str, retry_after: int) -> None:
        super().__init__(message, retry_after=retry_after)
        self.reason = reason


def _too_many(key: Key) -> CrowdedFault:
    return CrowdedFault(
        Crowded.KEY_CONCURRENT,
        f"this key may have {key.concurrent} requests at once; try again when one has ended",
        RETRY_AFTER,
    )


def new_key(name: str) -> tuple[str, str]:
    """Return a new key, and its table for the file, which holds only its digest. Raises ValueError."""
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is not a name; use up to 40 letters, digits, dots, dashes and underscores"
        )
    key = PREFIX + secrets.token_urlsafe(32)
    table = f'["{name}"]\nsha256 = "{_sha256(key).hex()}"\n'
    return key, table


def _sha256(key: str) -> bytes:
    return sha256(key.encode(errors="surrogateescape")).digest()


def _tables(path: Path, data: bytes) -> dict[str, _Table]:
    try:
        doc: dict[str, Any] = tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        where = re.search(r"line \d+", str(error))  # the rest of the message may quote a key
        raise KeysError(f"{path} is not TOML{f': look at {where[0]}' if where else ''}") from None
    tables = {}
    for name, value in doc.items():
        if not isinstance(value, dict):
            raise KeysError(f"{path}: each key needs its own table; write a line [NAME] above it")
        if not NAME.fullmatch(name):
            raise KeysError(
                f"{path}: a name has up to 40 letters, digits, dots, dashes and underscores; one name is "
                "longer, or has other characters"
            )
        try:
            tables[name] = _Table.model_validate(value)
        except ValidationError as error:
            wrong = error.errors(include_input=False, include_url=False)[0]
            reason = "there is no such field" if wrong["type"] == "extra_forbidden" else wrong["msg"]
            raise KeysError(f"{path}: [{name}] {wrong['loc'][0]}: {reason}") from None
    return tables


def _key(name: str, table: _Table) -> Key:
    if (table.key is None) is (table.sha256 is None):
        raise KeysError(f"[{name}] needs either `key` or its `sha256`")
    digest = bytes.fromhex(table.sha256) if table.sha256 else b""
    if table.key is not None:
        text = table.key.get_secret_value()
        if not text.isascii() or not text.isprintable() or " " in text:
            raise KeysError(f"[{name}] key: use printable ASCII characters without spaces")
        digest = _sha256(text)
    return Key(
        name=name,
        sha256=digest,
        namespace=table.namespace or name,
        operator=table.operator,
        concurrent=table.concurrent,
        queued=table.queued,
        tokens_per_minute=table.tokens_per_minute,
        priority=Priority(table.priority),
    )


def _exposed(path: Path, found: os.stat_result, *, plain: bool) -> str:
    """Return how other users could read or add keys, with the command that fixes it; "" if they cannot.

    A file of digests may be world readable: the digest of a long key reveals nothing.
    """
    us, word, mode = system.user(), shlex.quote(str(path)), stat.S_IMODE(found.st_mode)
    if us is None:  # Windows: the access list of its folder decides
        return ""
    if us != 0 and found.st_uid not in {0, us}:
        return f"{path} belongs to another user. Fix it: sudo chown {us} {word}"
    if plain and mode & (stat.S_IRWXG | stat.S_IRWXO):
        return f"{path} holds keys, and others may read it. Fix it: chmod 600 {word}"
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to {path}. Fix it: chmod go-w {word}"
    return ""
