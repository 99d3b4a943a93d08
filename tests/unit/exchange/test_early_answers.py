"""An answer that arrives before the upload ends, and a connection that is reset after the answer."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

import pytest
import uvloop

from patience import PATIENCE
from slotkeeper.exchange import forwarding
from slotkeeper.exchange.forwarding import CHUNK, RESET, BrokenOff, EngineAnswer

REFUSAL = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 7\r\n\r\nno key\n"
HEAD = b"POST / HTTP/1.1\r\nHost: engine\r\nContent-Length: 1048576\r\n\r\n"


class Server:
    """Reads the headers, answers, and resets the connection with the upload unread."""

    def __init__(self, says: bytes) -> None:
        self._says = says
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        plug, _ = self._listening.accept()
        seen = b""
        while b"\r\n\r\n" not in seen:
            seen += plug.recv(CHUNK)
        plug.sendall(self._says)
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        plug.close()
        self.over.set()

    def close(self) -> None:
        self._thread.join()
        self._listening.close()


def blocking_body(over: threading.Event) -> Iterator[bytes]:
    """Block the loop after the first piece until the server has closed, so that nothing is read before."""
    yield bytes(CHUNK)
    assert over.wait(PATIENCE)
    for _ in range(15):
        yield bytes(CHUNK)


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def new_loop(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    return request.param


@pytest.fixture(params=[REFUSAL])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(request.param)
    yield server
    server.close()


async def read_late(server: Server) -> tuple[int, bool]:
    """Return how many bytes arrive that are read only after the connection was reset, and whether all did."""
    answer, length, whole = EngineAnswer(), 0, False
    await asyncio.get_running_loop().create_connection(lambda: answer, "127.0.0.1", server.port)
    async with answer:
        await answer.ask(HEAD, iter(()))
        while not (answer._error or answer._ended):  # it holds back what it has, and the reset meets it so
            await asyncio.sleep(0.01)
            if not answer._reading:
                break
        assert server.over.wait(PATIENCE)
        with suppress(BrokenOff):
            while piece := await answer.read():
                length += len(piece)
            whole = True
    return length, whole


async def asked(server: Server) -> tuple[int, bytes]:
    answer, body = EngineAnswer(), b""
    await asyncio.get_running_loop().create_connection(lambda: answer, "127.0.0.1", server.port)
    async with answer:
        await answer.ask(HEAD, blocking_body(server.over))
        while piece := await answer.read():
            body += piece
        return answer.status, body


def test_an_answer_sent_before_a_failed_write_still_arrives(server, new_loop):
    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(asked(server)) == (401, b"no key\n")


LONG: Final = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n" + bytes(200_000)


@pytest.mark.parametrize("server", [LONG], indirect=True)
def test_a_reset_while_bytes_are_held_back_breaks_the_answer_off(server, new_loop, monkeypatch):
    monkeypatch.setattr(forwarding, "READ_AHEAD", 1000)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        length, whole = runner.run(read_late(server))
    assert 1000 < length <= 200_000
    assert not whole


@pytest.mark.parametrize("server", [b"", REFUSAL[:-3]], indirect=True, ids=["nothing", "half"])
def test_a_missing_or_partial_answer_fails_the_request(server, new_loop):
    with asyncio.Runner(loop_factory=new_loop) as runner, pytest.raises(BrokenOff):
        runner.run(asked(server))
