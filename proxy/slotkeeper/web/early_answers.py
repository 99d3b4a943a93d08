"""Hearing an engine that answers before it has read all that was sent to it.

llama-server refuses a bad key, answers and closes with the upload unread. What is written to it then fails,
and asyncio and uvloop close a connection whose write failed at once, though the answer may still lie in the
socket. So that is read before the connection is given up.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import Any, Final

import aiohttp

PIECE: Final = 64 * 1024


class Connector(aiohttp.TCPConnector):
    """Its connections hand over all that was received before they report that they are lost."""

    async def connect(self, *args: Any, **kwargs: Any) -> aiohttp.connector.Connection:
        connection = await super().connect(*args, **kwargs)
        transport, handler = connection.transport, connection.protocol
        if transport is not None and handler is not None and not transport.get_extra_info("sslcontext"):
            transport.set_protocol(_ToTheEnd(handler, transport))
        return connection


class _ToTheEnd(asyncio.Protocol):
    """Between a transport and the protocol that was its own."""

    def __init__(self, handler: asyncio.Protocol, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.data_received = handler.data_received  # type: ignore[method-assign]  # of every chunk
        self.eof_received = handler.eof_received  # type: ignore[method-assign]
        self.pause_writing = handler.pause_writing  # type: ignore[method-assign]
        self.resume_writing = handler.resume_writing  # type: ignore[method-assign]
        self._lost = handler.connection_lost

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and (left := _unread(self._transport)):
            self.data_received(left)
        self._lost(exc)


def _unread(transport: asyncio.Transport) -> bytes:
    """What was received, and not read: the socket is closed after `connection_lost`, and does not block."""
    pieces = []
    with suppress(OSError):
        plug = transport.get_extra_info("socket").fileno()
        while piece := os.read(plug, PIECE):
            pieces.append(piece)
    return b"".join(pieces)
