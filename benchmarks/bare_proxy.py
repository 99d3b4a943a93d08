"""A reverse proxy of aiohttp that decides nothing: the time that the framework alone adds to a request.

`python -m benchmarks.bare_proxy PORT UPSTREAM`. It serves until it is terminated.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import aiohttp
import uvloop
from aiohttp import web

from benchmarks.raw import listening
from slotkeeper.engine.child.launch import free_port

KEPT: Final = ("Content-Type", "Authorization")


async def serve(port: int, upstream: str) -> None:
    # One connection for each request, as in the sidecar: the engine closes connections despite keep-alive.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, limit=0)) as session:

        async def relay(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            headers = {name: request.headers[name] for name in KEPT if name in request.headers}
            asked = session.request(request.method, upstream + request.path_qs, data=body, headers=headers)
            async with asked as answer:
                response = web.StreamResponse(status=answer.status)
                response.content_type = answer.content_type
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", relay)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


@asynccontextmanager
async def bare_proxy(upstream: str) -> AsyncIterator[str]:
    """Run the proxy in its own process and yield its URL. Raises TimeoutError."""
    port = free_port()
    words = ("-m", "benchmarks.bare_proxy", str(port), upstream)
    process = await asyncio.create_subprocess_exec(sys.executable, *words)
    try:
        await listening(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def main(arguments: Sequence[str]) -> None:
    port, upstream = arguments
    uvloop.run(serve(int(port), upstream))


if __name__ == "__main__":
    main(sys.argv[1:])
