"""An answer that arrives before the upload ends, and a connection that is reset after the answer."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from io import BytesIO

import aiohttp
import pytest
import uvloop

from patience import PATIENCE
from slotkeeper.exchange.forwarding import PIECE, RESET, Connector

REFUSAL = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 7\r\n\r\nno key\n"
LARGE = b"x" * (16 * PIECE)


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
            seen += plug.recv(PIECE)
        plug.sendall(self._says)
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        plug.close()
        self.over.set()

    def close(self) -> None:
        self._thread.join()
        self._listening.close()


class BlockingBody(BytesIO):
    """Blocks the loop after the first piece until the server has closed, so that nothing is read before."""

    def __init__(self, over: threading.Event) -> None:
        super().__init__(LARGE)
        self._over = over

    def read(self, size: int | None = -1) -> bytes:
        if self.tell():
            assert self._over.wait(PATIENCE)
        return super().read(size)


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def new_loop(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    return request.param


@pytest.fixture(params=[REFUSAL])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(request.param)
    yield server
    server.close()


async def asked(server: Server) -> tuple[int, bytes]:
    async with aiohttp.ClientSession(connector=Connector(force_close=True)) as session:
        body = BlockingBody(server.over)
        async with session.post(f"http://127.0.0.1:{server.port}/", data=body) as answer:
            return answer.status, await answer.read()


def test_an_answer_sent_before_a_failed_write_still_arrives(server, new_loop):
    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(asked(server)) == (401, b"no key\n")


@pytest.mark.parametrize("server", [b"", REFUSAL[:-3]], indirect=True, ids=["nothing", "half"])
def test_a_missing_or_partial_answer_fails_the_request(server, new_loop):
    with asyncio.Runner(loop_factory=new_loop) as runner, pytest.raises(aiohttp.ClientError):
        runner.run(asked(server))
