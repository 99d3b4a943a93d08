"""Connections that send nothing, or send slowly, do not delay the others."""

from __future__ import annotations

import asyncio
import resource
from contextlib import AsyncExitStack, suppress
from functools import partial

import orjson
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from chaos.conftest import ready, settings
from chaos.fake_answers import PATHS, request_body
from chaos.raw import Wire, dial, until
from commands.process import serving
from patience import PATIENCE
from slotkeeper.api.head import Api
from slotkeeper.app import ADMIN_CONNECTIONS, ADMIN_CONNECTIONS_OF_ONE, ADMIN_HEAD_SECONDS, Sidecar, running
from slotkeeper.exchange.forwarding import MOST_HEADERS
from slotkeeper.runtime.link import CALM

CHAT = PATHS[Api.CHAT]
MOST = 8
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"

STANDARD_STREAMS = 3  # descriptors that a process keeps open

# No connection is cut for its silence meanwhile.
few = partial(
    settings,
    max_connections=MOST,
    max_connections_per_address=MOST,
    head_timeout=PATIENCE,
    drain_timeout=1.0,
)


def cut(sidecar: Sidecar, reason: str) -> float:
    name = "slotkeeper_connections_cut_total"
    return sidecar.metrics.registry.get_sample_value(name, {"reason": reason}) or 0


async def fill(stack: AsyncExitStack, sidecar: Sidecar, count: int, source: str | None = None) -> list[Wire]:
    """Open this many connections that send nothing."""
    before = len(sidecar._connections[0])
    address = sidecar.addresses[0]
    wires = [await stack.enter_async_context(dial(address, source=source)) for _ in range(count)]
    await until(lambda: len(sidecar._connections[0]) == before + count)
    return wires


async def served(wire: Wire) -> bool:
    await wire.post(CHAT, request_body(Api.CHAT, stream=False))
    head = await wire.head()
    await wire.body(head)
    return head.status == 200


async def begun(stack: AsyncExitStack, address: str) -> Wire:
    """Return a connection whose first request was in time: on a busy machine some are cut before."""
    async with asyncio.timeout(PATIENCE):
        while True:
            wire = await stack.enter_async_context(dial(address))
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                assert await served(wire)
                return wire


async def test_a_connection_above_the_limit_is_refused_until_another_closes(fake):
    async with running(few(fake.base)) as sidecar, AsyncExitStack() as stack:
        await ready(sidecar)
        silent = await fill(stack, sidecar, MOST)
        async with dial(sidecar.addresses[0]) as refused:
            assert (await refused.rest())[0] == b""
        assert cut(sidecar, "full") == 1
        async with dial(sidecar.addresses[1]) as admin:
            await admin.send(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await admin.head()).status == 200, "the admin port has separate limits"
        silent[0].leave()
        await until(lambda: len(sidecar._connections[0]) == MOST - 1)
        async with dial(sidecar.addresses[0]) as wire:
            assert await served(wire)
        assert await served(silent[1]), "a connection that was accepted is served"


async def test_one_address_cannot_take_all_connections(fake):
    async with running(few(fake.base, max_connections_per_address=3)) as sidecar, AsyncExitStack() as stack:
        await ready(sidecar)
        await fill(stack, sidecar, 3, "127.0.0.2")
        async with dial(sidecar.addresses[0], source="127.0.0.2") as refused:
            assert (await refused.rest())[0] == b""
        assert cut(sidecar, "address") == 1
        async with dial(sidecar.addresses[0], source="127.0.0.3") as wire:
            assert await served(wire)


async def test_a_trusted_proxy_is_exempt_from_the_limit_for_an_address(fake):
    trusting = few(fake.base, max_connections_per_address=3, trusted_proxies=("127.0.0.2",))
    async with running(trusting) as sidecar, AsyncExitStack() as stack:
        await ready(sidecar)
        assert await served((await fill(stack, sidecar, MOST, "127.0.0.2"))[-1])


LIVEZ = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def lives(admin: str, source: str | None = None) -> bool:
    async with dial(admin, source=source) as wire:
        await wire.send(LIVEZ)
        return (await wire.head()).status == 200


@pytest.fixture
def patient_admin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no connection to the admin port be cut for its silence."""
    monkeypatch.setattr("slotkeeper.app.ADMIN_HEAD_SECONDS", PATIENCE)


@pytest.mark.usefixtures("patient_admin")
@pytest.mark.parametrize(
    "sources", [["127.0.0.2"], [f"127.0.0.{n}" for n in range(2, 10)]], ids=["one", "many"]
)
@pytest.mark.parametrize("said", [b"", b"GET /livez", LIVEZ], ids=["nothing", "half a head", "a request"])
async def test_probes_are_answered_while_idle_connections_fill_the_admin_port(sidecar, sources, said):
    """The connection that was idle for longest is closed for each new one."""
    admin, there = sidecar.addresses[1], sidecar._connections[1]
    async with AsyncExitStack() as stack:
        for n in range(2 * ADMIN_CONNECTIONS):
            wire = await stack.enter_async_context(dial(admin, source=sources[n % len(sources)]))
            await wire.send(said)
        await until(lambda: cut(sidecar, "replaced") > 0, "the limit was reached")
        assert len(there) <= ADMIN_CONNECTIONS
        assert all([await lives(admin, source) for source in ("127.0.0.1", sources[0])])


@pytest.mark.usefixtures("patient_admin")
async def test_a_request_on_the_admin_port_is_not_closed_for_a_new_connection(sidecar, monkeypatch):
    """Only if all connections are busy, the oldest request is."""
    admin, goes_on, busy = sidecar.addresses[1], asyncio.Event(), 0

    async def slow(*_: object) -> bytes:
        nonlocal busy
        busy += 1
        await goes_on.wait()
        return b"{}"

    monkeypatch.setattr(web.BaseRequest, "read", slow)
    async with AsyncExitStack() as stack, dial(admin) as working:
        await working.send(b"POST /api/drain HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")
        await until(lambda: busy)
        for _ in range(ADMIN_CONNECTIONS_OF_ONE + 4):
            await stack.enter_async_context(dial(admin))
        await until(lambda: cut(sidecar, "replaced") >= 4)
        goes_on.set()
        assert (await working.head()).status == 400, "it is answered: the body names no engine"


async def test_a_silent_connection_to_the_admin_port_is_closed_before_one_to_the_data_port(sidecar):
    data, admin = sidecar._connections
    assert admin._head_seconds == ADMIN_HEAD_SECONDS < data._head_seconds


@pytest.mark.parametrize("said", [b"", b"G", HEAD.encode()], ids=["nothing", "a letter", "half a head"])
async def test_a_connection_that_sends_no_complete_head_in_time_is_closed(fake, said):
    async with running(settings(fake.base, head_timeout=0.2, drain_timeout=1.0)) as sidecar:
        await ready(sidecar)
        async with AsyncExitStack() as stack:
            known = await begun(stack, sidecar.addresses[0])
            before = cut(sidecar, "head")
            wire = await stack.enter_async_context(dial(sidecar.addresses[0]))
            await wire.send(said)
            await wire.rest()
            assert cut(sidecar, "head") == before + 1
            assert await served(known), "after a first request a connection may be idle"


async def test_a_body_that_does_not_arrive_in_time_gets_408(fake):
    async with running(settings(fake.base, body_timeout=0.2, drain_timeout=1.0)) as sidecar:
        await ready(sidecar)
        async with dial(sidecar.addresses[0]) as wire:
            await wire.send(HEAD.encode() + b"\r\n{")
            head = await wire.head()
            assert head.status == 408
            assert b"did not arrive in time" in await wire.body(head)
            assert cut(sidecar, "body") == 1
            assert sidecar._intake.free == sidecar._intake.total
        assert not fake.ran


async def test_refused_connections_are_logged_once_a_minute(fake):
    async with running(few(fake.base, max_connections=1)) as sidecar, AsyncExitStack() as stack:
        await ready(sidecar)
        await fill(stack, sidecar, 1)
        with capture_logs() as lines:
            for _ in range(20):
                async with dial(sidecar.addresses[0]) as refused:
                    await refused.rest()
        assert cut(sidecar, "full") == 20
        said = [line for line in lines if line["event"] == "connection_refused"]
        assert len(said) == 1
        assert said[0]["why"] == "full"


async def test_requests_get_503_while_no_file_descriptor_is_free(fake, tmp_path):
    """Descriptors are kept free for engines and files, but an even lower limit is always possible.

    The engine is not taken for lost meanwhile: requests would wait for it to return.
    """
    log = tmp_path / "log"
    async with AsyncExitStack() as stack:
        stderr = stack.enter_context(log.open("wb"))
        there = serving("--upstream", fake.base, stderr=stderr)
        process, data, admin = await asyncio.to_thread(there.__enter__)
        stack.push_async_callback(asyncio.to_thread, there.__exit__, None, None, None)
        wire = await stack.enter_async_context(dial(data))
        assert await served(wire)

        # A limit below what is open takes effect at once, and no descriptor that is closed makes room.
        allowed = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (STANDARD_STREAMS, allowed[1]))
        async with dial(admin):  # it cannot be accepted now
            await asyncio.sleep(2 * CALM)  # its health cannot be asked meanwhile
            await wire.post(CHAT, request_body(Api.CHAT, stream=False))
            head = await wire.head()
            assert head.status == 503
            assert int(head["Retry-After"]) > 0
            assert b"no file descriptor is left" in await wire.body(head)
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, allowed)
            assert await served(wire), "descriptors are free again"
            assert await lives(admin), "connections are accepted again"
    assert "no file descriptor is left" in log.read_text()
    assert "engine_lost" not in log.read_text()


@pytest.mark.parametrize("model", ["tiny-dense"])
@pytest.mark.parametrize("connection", [{"Connection": "keep-alive"}, {}])
@pytest.mark.parametrize("forwarded", [{}, {"X-Forwarded-For": "192.0.2.1", "X-Request-Id": "one"}])
async def test_a_client_may_send_as_many_headers_as_the_engine_takes(
    engine_factory, build, model, connection, forwarded
):
    """The engine takes 100. Ours are left out rather than make a request of the client's too many."""
    engine = engine_factory(model, build)
    body = orjson.dumps({"prompt": "the keeper", "n_predict": 1})
    requests = {
        b"POST /completion HTTP/1.1": body,
        b"POST /tokenize HTTP/1.1": orjson.dumps({"content": "a"}),
        b"GET /props HTTP/1.1": b"",
    }

    async def status(address: str, line: bytes, count: int) -> int:
        sent = requests[line]
        own = {"Host": "x", **({"Content-Length": str(len(sent))} if sent else {}), **connection, **forwarded}
        own |= {f"X-Own-{n}": "v" for n in range(count - len(own))}
        head = "".join(f"{name}: {value}\r\n" for name, value in own.items())
        async with dial(address) as wire:
            await wire.send(line + f"\r\n{head}\r\n".encode() + sent)
            return (await wire.head()).status

    # With one header more ours may pass and stock does not: a Connection header goes no further than here.
    counts = (6, *range(93, MOST_HEADERS + 1), MOST_HEADERS + 2)
    asked = [(line, count) for line in requests for count in counts]
    async with running(settings(engine.base, drain_timeout=1.0)) as sidecar:
        await ready(sidecar)
        direct = [await status(engine.base, *one) for one in asked]
        assert direct[-2:] == [200, 400], "the engine's limit"
        assert [await status(sidecar.addresses[0], *one) for one in asked] == direct
