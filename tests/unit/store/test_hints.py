"""Hints of a server that answers what no sidecar wrote. Real servers: tests/fleet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from slotkeeper.store.shared_store.hints import Hints

STRANGE: Final = b"\xff\xfe no name of ours"


@asynccontextmanager
async def server(answers: dict[bytes, bytes]) -> AsyncIterator[tuple[Hints, list[bool]]]:
    """Run a server with these answers, by command; it answers OK to all others. Yield hints of it."""
    changes: list[bool] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readline():
            words = []
            for _ in range(int(head[1:])):
                size = int((await reader.readline())[1:])
                words.append((await reader.readexactly(size + 2))[:-2])
            writer.write(answers.get(words[0], b"+OK\r\n"))
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    hints = Hints(f"redis://127.0.0.1:{port}/?protocol=2", "a store", lambda up, _: changes.append(up))
    try:
        yield hints, changes
    finally:
        await hints.close()
        listening.close()


def members(*names: bytes) -> bytes:
    return b"*%d\r\n" % len(names) + b"".join(b"$%d\r\n%s\r\n" % (len(name), name) for name in names)


async def test_names_and_other_values_that_are_no_text_are_no_hints():
    value = b"$%d\r\n%s\r\n" % (len(STRANGE), STRANGE)
    answers = dict.fromkeys((b"SET", b"EXISTS", b"SREM", b"EVAL"), value)
    async with server(answers | {b"SMEMBERS": members(b"*", b"one", STRANGE)}) as (hints, changes):
        names = await hints.names("heads/a/b")
        assert names is not None
        assert "one" in names
        async with hints.writing("state", 1) as free:
            assert isinstance(free, bool)
        assert isinstance(await hints.is_read("state"), bool)
        assert await hints.collects(10) in {True, False, None}
        await hints.reading("state", 1)
        await hints.removed("heads/a/b", "one")
        assert changes == []
