"""The admin port against web pages: host names of this machine, requests from other sites, caches."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import example, given
from hypothesis import strategies as st

from slotkeeper.admin.admin import AdminPort
from slotkeeper.admin.guard import authority, same_site
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime.driver import Driver
from slotkeeper.scheduler.snapshots.budgets import Limits
from unit.runtime.stubs import ENGINE, StubLink

EVERY = ("/", "/metrics", "/api/state", "/api/requests", "/api/tree", "/api/snapshots")
PROBES = ("/livez", "/readyz", "/healthz")
REMOVE = "/api/snapshots/slotkeeper-000000000000-00000000"


async def port(token: str | None) -> AsyncIterator[TestClient]:
    driver = Driver({ENGINE: StubLink()}, Metrics())
    app = AdminPort(driver, driver.metrics, token, Limits(), hosts=("Box.lan",)).app()
    async with TestClient(TestServer(app)) as client:
        yield client
    await driver.close()


@pytest.fixture
async def client() -> AsyncIterator[TestClient]:
    async for one in port(None):
        yield one


@pytest.fixture
async def locked() -> AsyncIterator[TestClient]:
    async for one in port("tökën"):
        yield one


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:9090", "a.localhost", "127.0.0.1:1", "[::1]:9090", "10.2.3.4", "box.lan:9090"],
)
async def test_the_admin_port_answers_to_its_own_host_names(client, host):
    async with client.get("/api/state", headers={"Host": host}) as answer:
        assert answer.status == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:9090", "localhost.evil.example", "127.0.0.1.evil.example"),
        *("", "[::", "@", "evil.example\\@localhost", "evil.example@localhost", "localhost@evil.example"),
        *(
            "localhost#evil.example",
            "localhost?x",
            "localhost/x",
            "localhost:80:90",
            "localhost:x",
            "localhost:",
        ),
        *(
            "http://localhost",
            "localhost, evil.example",
            "localhost evil.example",
            "127.0.0.1\\x",
            "%6cocalhost",
        ),
    ],
)
async def test_the_admin_port_refuses_other_host_names(client, host):
    for path in EVERY:
        async with client.get(path, headers={"Host": host}) as answer:
            assert answer.status == 403
            assert "--admin-host" in (await answer.json())["error"]
    for path in PROBES:
        async with client.get(path, headers={"Host": host}) as answer:
            assert answer.status != 403


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://evil.example://localhost:9090", "Host": "localhost:9090"},
        {"Origin": "http://evil.example\\@localhost:9090", "Host": "localhost:9090"},
        {"Origin": "http://evil.example/://localhost:9090", "Host": "localhost:9090"},
        {"Origin": "file://localhost:9090", "Host": "localhost:9090"},
        {"Origin": "localhost:9090", "Host": "localhost:9090"},
        {"Origin": "http://localhost:9090/", "Host": "localhost:9090"},
        {"Origin": "", "Host": "localhost:9090"},
        {"Origin": "http://localhost:8080", "Host": "localhost:9090"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
async def test_requests_from_pages_of_other_sites_change_nothing(client, headers):
    for method, path in (("DELETE", REMOVE), ("POST", "/api/snapshots/verify")):
        async with client.request(method, path, headers=headers) as answer:
            assert answer.status == 403


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "http://Localhost:9090", "Host": "localhost:9090"},
        {"Origin": "https://box.lan", "Host": "box.lan:443"},
        {"Origin": "http://[::1]:9090", "Host": "[::1]:9090"},
        {"Sec-Fetch-Site": "same-origin"},
    ],
)
async def test_the_dashboard_and_commands_may_change_state(client, headers):
    async with client.delete(REMOVE, headers=headers) as answer:
        assert answer.status == 404  # there is no such snapshot


async def test_every_answer_has_a_content_type_guard_and_is_not_cached(client, locked):
    for one, status in ((client, 200), (locked, 401)):
        for path in ("/metrics", "/api/state"):
            async with one.get(path) as answer:
                assert answer.status == status
                assert answer.headers["Cache-Control"] == "no-store"
                assert answer.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(("given", "status"), [("tökën", 200), ("t\udcc3", 401), ("", 401)])
async def test_a_token_may_contain_any_characters(locked, given, status):
    async with locked.get("/api/state", headers={"Authorization": f"Bearer {given}"}) as answer:
        assert answer.status == status


PARTS = st.sampled_from(
    [
        *"@\\/:?#[]%,;. \t\0",
        "://",
        "localhost",
        "127.0.0.1",
        "[::1]",
        "evil.example",
        "9090",
        "http",
        "%40",
        "\uff0e",
    ]
)
HOST = re.compile(
    r"([A-Za-z0-9._~!$&'()*+,;=%-]+|\[[0-9A-Fa-f:.]+\])(?::([0-9]+))?"
)  # RFC 3986, without a user


@given(st.lists(PARTS, max_size=6).map("".join))
@example("evil.example\\@localhost")
def test_a_host_is_read_only_if_it_has_one_reading(text):
    """Any accepted text is NAME or NAME:PORT, whose name begins the text."""
    found = authority(text)
    if found is not None:
        name, port = found
        plain = HOST.fullmatch(text)
        assert plain is not None
        assert plain[1].strip("[]").rstrip(".").lower() == name
        assert plain[2] == (None if port is None else str(port))


@given(st.lists(PARTS, max_size=6).map("".join), st.sampled_from(["localhost:9090", "box.lan", "[::1]:1"]))
@example("http://evil.example://localhost:9090", "localhost:9090")
def test_an_origin_is_ours_only_if_it_is_a_scheme_and_our_host(origin, host):
    assert same_site(f"http://{host}", host)
    if same_site(origin, host):
        assert origin.lower() in {f"{scheme}://{host}" for scheme in ("http", "https")}
