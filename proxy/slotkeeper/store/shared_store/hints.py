"""Hints in Redis or Valkey: what the shared store has, and which sidecar writes or restores what.

    slotkeeper:STORE:names:FOLDER     a set of the entries under one anchor; "*" says that it is complete
    slotkeeper:STORE:writing:STATE    a lease: one sidecar writes this state
    slotkeeper:STORE:reading:STATE    a sidecar restores this state: the collector does not remove it
    slotkeeper:STORE:collects         a lease: one sidecar collects garbage

The shared store works without hints. Every key expires. Names contain no text of a prompt (`object_names`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from hashlib import blake2b
from typing import Any, Final, TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

ANSWER_SECONDS: Final = 0.5  # seconds for one command: a listing of the store takes no longer
RETRY_SECONDS: Final = 5.0
NAMES_SECONDS: Final = 600  # seconds for which a set of names is used; then it is read from the store again
LEASE_SECONDS: Final = 60  # seconds, the shortest lease for a write or a read
SLOWEST: Final = 10_000_000  # bytes per second: a lease lasts long enough for a transfer at this rate
ALL: Final = "*"  # a member of a set that is complete
_RELEASE: Final = (
    "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"
)

T = TypeVar("T")


class Hints:
    """The client for hints. Methods do not raise if the server fails; they return what means "not known"."""

    def __init__(self, url: str, store: str, changed: Callable[[bool, str], None]) -> None:
        """`store`, its URL or path, separates the hints of several stores. Raises ValueError for a bad `url`.

        `changed` is called when the server begins to answer or stops, with that fact and the error's name.
        """
        self._redis: Any = Redis.from_url(
            url,
            socket_timeout=ANSWER_SECONDS,
            socket_connect_timeout=ANSWER_SECONDS,
            retry=Retry(NoBackoff(), 0),
        )
        self._prefix = f"slotkeeper:{blake2b(store.encode(), digest_size=8).hexdigest()}"
        self._changed = changed
        self._holder = secrets.token_hex(8)
        self._up = True
        self._silent_until = 0.0

    @property
    def up(self) -> bool:
        return self._up

    async def close(self) -> None:
        await self._ask(self._redis.aclose, None)

    # -- what the store has ------------------------------------------------------------------------

    async def names(self, folder: str) -> set[str] | None:
        """Return the entries in one folder of the store; None if not all of them are known."""
        key = self._key("names", folder)
        raw: set[bytes] = await self._ask(lambda: self._redis.smembers(key), set())
        found = {name.decode(errors="replace") for name in raw}  # anyone may have written them
        return found - {ALL} if ALL in found else None

    async def listed(self, folder: str, names: Collection[str]) -> None:
        """Remember the complete listing of one folder of the store."""
        key = self._key("names", folder)

        async def write() -> None:
            async with self._redis.pipeline() as pipeline:
                pipeline.sadd(key, ALL, *names)
                pipeline.expire(key, NAMES_SECONDS)
                await pipeline.execute()

        await self._ask(write, None)

    async def added(self, folder: str, name: str) -> None:
        """Add an entry to the names of one folder."""
        key = self._key("names", folder)

        async def write() -> None:
            async with self._redis.pipeline() as pipeline:
                pipeline.sadd(key, name)
                pipeline.expire(key, NAMES_SECONDS, nx=True)
                await pipeline.execute()

        await self._ask(write, None)

    async def removed(self, folder: str, name: str) -> None:
        await self._ask(lambda: self._redis.srem(self._key("names", folder), name), None)

    # -- leases ------------------------------------------------------------------------------------

    @asynccontextmanager
    async def writing(self, state: str, size: int) -> AsyncIterator[bool]:
        """Hold the lease to write a state of `size` bytes. Yields False if another sidecar holds it."""
        key = self._key("writing", state)
        free = await self._ask(
            lambda: self._redis.set(key, self._holder, nx=True, ex=LEASE_SECONDS + size // SLOWEST), True
        )
        try:
            yield bool(free)
        finally:
            if free:
                await self._ask(lambda: self._redis.eval(_RELEASE, 1, key, self._holder), None)

    async def reading(self, state: str, size: int) -> None:
        """Mark the state as being restored. The mark only expires: a state that was just used must stay."""
        seconds = LEASE_SECONDS + size // SLOWEST
        await self._ask(lambda: self._redis.set(self._key("reading", state), self._holder, ex=seconds), None)

    async def is_read(self, state: str) -> bool:
        """Whether a sidecar restores this state now; False if that is not known."""
        return bool(await self._ask(lambda: self._redis.exists(self._key("reading", state)), 0))

    async def collects(self, seconds: int) -> bool | None:
        """Whether this sidecar collects garbage for the next `seconds`; None if that is not known."""
        key = self._key("collects")
        free = await self._ask(lambda: self._redis.set(key, self._holder, nx=True, ex=seconds), None)
        return bool(free) if self._up else None

    def _key(self, *parts: str) -> str:
        return ":".join((self._prefix, *parts))

    async def _ask(self, question: Callable[[], Awaitable[T]], otherwise: T) -> T:
        if time.monotonic() < self._silent_until:
            return otherwise
        try:
            answer = await question()
        except (RedisError, OSError, TimeoutError) as error:
            self._silent_until = time.monotonic() + RETRY_SECONDS
            if self._up:
                self._up = False
                self._changed(False, type(error).__name__)
            return otherwise
        if not self._up:
            self._up = True
            self._changed(True, "")
        return answer
