"""Writes, reads and lists objects in S3, a service with the S3 API, or a folder of several machines.

An operation can fail in two ways: there is no such object (MissingError), or the store cannot be used now
(StoreError). That another sidecar has already written an object is no error.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import LocalStore, from_url

from slotkeeper.store.trouble import MissingError, StoreError, Trouble

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

AT_A_TIME: Final = 256  # objects that are looked at before the event loop runs again: some milliseconds
AT_ONCE: Final = 16 << 20  # bytes, the most in a single request, which can be made not to overwrite
PART: Final = 8 << 20  # bytes of a part of a larger object; S3 takes 10,000 of them
PARTS: Final = 4  # parts that are uploaded at the same time
CONNECT: Final = timedelta(seconds=3)
SILENCE: Final = timedelta(seconds=20)  # after this time without a byte a request has failed
TRIES: Final[RetryConfig] = {
    "max_retries": 2,
    "retry_timeout": timedelta(seconds=10),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2), "base": 2},
}
RETRY_SECONDS: Final = 5.0  # for this time after a failure no request is sent to the store
_FULL: Final = re.compile(r"\b507\b|InsufficientStorage|QuotaExceeded|StorageFull|os error (28|122)\b")
_STATUS: Final = re.compile(r"status code: (\d+)")
_NAME: Final = re.compile(r"[0-9A-Za-z-]+")  # of every object and folder of ours
_STAGED: Final = re.compile(r".*#\d+")  # a temporary file that a killed writer leaves in a folder
ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


@dataclass(frozen=True, slots=True)
class ObjectSeen:
    """One object in a listing. `changed` is a time of the store's own clock, in seconds."""

    path: str
    size: int
    changed: float


class Objects:
    """The operations that we need of an object store. All except `sweep` may raise StoreError."""

    def __init__(self, url: str, changed: Callable[[bool, str], None]) -> None:
        """Open the store. Raises ValueError for a URL that cannot be used.

        `changed` is called when the store becomes usable or unusable, with the reason if it is unusable.
        """
        self.url = url
        self._changed = changed
        self.up = True
        self._failed: StoreError | None = None
        self._silent_until = 0.0
        try:
            self._store: Any = _opened(url)
        except (BaseError, OSError) as error:
            raise ValueError(_in_short(error)) from error

    def __repr__(self) -> str:
        return f"<Objects {self.url} {'up' if self.up else 'down'}>"

    async def create(self, path: str, data: bytes) -> bool:
        """Write a whole object unless it exists. Returns whether this call wrote it."""
        with self._asking(f"write {path}", existing=False):
            try:
                await obstore.put_async(self._store, path, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
        return True

    async def mark(self, path: str) -> None:
        """Write an empty object, or renew its time."""
        with self._asking(f"write {path}", existing=False):
            await obstore.put_async(self._store, path, b"")

    async def stream_up(self, path: str, chunks: AsyncIterable[bytes]) -> None:
        """Write an object that is too large for a single request, under a name that no other sidecar uses.

        The object appears when all parts are written. If `chunks` raises, nothing is left.
        """
        with self._asking(f"write {path}", existing=False):
            await obstore.put_async(
                self._store, path, chunks, use_multipart=True, chunk_size=PART, max_concurrency=PARTS
            )

    async def read(self, path: str, most: int) -> bytes:
        """Read a small object whole. Raises MissingError, also if it has more than `most` bytes."""
        with self._asking(f"read {path}"):
            result = await obstore.get_async(self._store, path)
            if result.meta["size"] > most:
                raise MissingError(f"{path} is too large: {result.meta['size']} bytes")
            return bytes(await result.bytes_async())

    async def stream_down(self, path: str) -> AsyncIterator[memoryview]:
        """Yield the bytes of an object in chunks. Raises MissingError."""
        with self._asking(f"read {path}"):
            result = await obstore.get_async(self._store, path)
            async for chunk in result.stream(min_chunk_size=1 << 20):
                yield memoryview(chunk)

    async def size(self, path: str) -> int | None:
        """Return the size of an object in bytes; None if it does not exist."""
        try:
            with self._asking(f"look at {path}"):
                return int((await obstore.head_async(self._store, path))["size"])
        except MissingError:
            return None

    async def listing(self, folder: str, *, existing: bool = False) -> AsyncIterator[ObjectSeen]:
        """Yield the objects whose paths begin with `folder` and a slash. The event loop runs in between.

        With `existing` raises MissingError if the folder or one in it is not there. A bucket has no folders.
        """
        root = self._store.prefix if isinstance(self._store, LocalStore) else None
        with self._asking(f"list {folder}", existing=existing and root is not None):
            if root:
                there = await asyncio.to_thread(_in_folder, Path(root), folder, existing)
                for number, seen in enumerate(there, start=1):
                    yield seen
                    if number % AT_A_TIME == 0:
                        await asyncio.sleep(0)
                return
            async for page in obstore.list(self._store, prefix=folder + "/", chunk_size=AT_A_TIME):
                for found in page:
                    changed = found["last_modified"].timestamp()
                    yield ObjectSeen(str(found["path"]), int(found["size"]), changed)

    async def remove(self, path: str) -> None:
        """Remove an object if it exists."""
        try:
            with self._asking(f"remove {path}"):
                await obstore.delete_async(self._store, path)
        except MissingError:
            pass

    def sweep(self, older: float) -> int:
        """Remove temporary files of killed writers from a folder that are `older` than so many seconds.

        Blocks. Returns the number of removed files. Raises OSError if the folder cannot be read.
        """
        root = self._store.prefix if isinstance(self._store, LocalStore) else None
        if root is None:
            return 0
        swept = 0
        for path in Path(root).rglob("*#*"):
            with suppress(OSError):  # its writer has renamed it meanwhile, or it is another user's
                if _STAGED.fullmatch(path.name) and time.time() - path.lstat().st_mtime > older:
                    path.unlink()
                    swept += 1
        return swept

    @contextmanager
    def _asking(self, doing: str, *, existing: bool = True) -> Iterator[None]:
        """Turn the errors of one request into ours.

        "Not found" means a missing object only if the request is for an `existing` one. S3 answers writes and
        listings with it if there is no such bucket.
        """
        if self._failed and time.monotonic() < self._silent_until:
            raise StoreError(self._failed.trouble, f"Cannot {doing} in {self.url}: it failed a moment ago")
        try:
            yield
        except (BaseError, OSError) as error:
            if isinstance(error, FileNotFoundError) and existing:
                self._works(up=True)
                raise MissingError(f"Cannot {doing}: it is not there") from error
            what = f"Cannot {doing} in {self.url}: {_in_short(error)}"
            trouble = _trouble(error)
            failed = StoreError(trouble, what)
            if trouble is not Trouble.DISK_FULL:  # a full store can still be read
                self._failed, self._silent_until = failed, time.monotonic() + RETRY_SECONDS
            self._works(up=False, why=trouble.value)
            raise failed from None  # the text of the cause may contain the key
        self._failed = None
        self._works(up=True)

    def _works(self, *, up: bool, why: str = "") -> None:
        if up is not self.up:
            self.up = up
            self._changed(up, why)


def _in_folder(root: Path, folder: str, existing: bool) -> list[ObjectSeen]:
    """List a folder. obstore lists nothing if one name is no path for it, as Finder makes. Raises OSError."""
    found, failed = list[ObjectSeen](), _failed if existing else _unless_missing
    for base, folders, names in os.walk(root / folder, onerror=failed, followlinks=True):
        folders[:] = filter(_NAME.fullmatch, folders)
        for path in (Path(base, name) for name in names if _NAME.fullmatch(name)):
            with suppress(FileNotFoundError):  # another sidecar has removed it meanwhile
                seen = path.stat()
                found.append(ObjectSeen(path.relative_to(root).as_posix(), seen.st_size, seen.st_mtime))
    return found


def _failed(error: OSError) -> None:
    raise error


def _unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _opened(url: str) -> Any:
    """Open the store. obstore reads credentials, region and endpoint from the environment (AWS_...)."""
    if not url.startswith("s3://"):
        path = Path(url.removeprefix("file://")).expanduser()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return LocalStore(path.resolve())
    named = next(filter(None, map(os.environ.get, ENDPOINTS)), "")
    client: ClientConfig = {
        "timeout": timedelta(days=1),  # for a whole request: a large object may take long
        "read_timeout": SILENCE,
        "connect_timeout": CONNECT,
        "allow_http": named.startswith("http://"),  # the user has set it so
    }
    return from_url(url, client_options=client, retry_config=TRIES)


def _trouble(error: Exception) -> Trouble:
    text = str(error)
    if _FULL.search(text):
        return Trouble.DISK_FULL
    status = _STATUS.search(text)
    refused = status is not None and status[1] in {"401", "403"}  # a listing has no error of its own for it
    if refused or isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError):
        return Trouble.REFUSED
    return Trouble.UNREACHABLE


def _in_short(error: Exception) -> str:
    """Return the error's type and status only: S3's text may repeat a key's id or a signature."""
    status = _STATUS.search(str(error))
    return f"{type(error).__name__}{f', status {status[1]}' if status else ''}"
