"""When the sidecar asks an engine about a credential, and for how long the answer is remembered."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from slotkeeper.api.errors import ClientFault, UpstreamFault
from slotkeeper.api.head import Api, classify
from slotkeeper.engine.answers import Health
from slotkeeper.engine.client import EngineAddress, Pulse
from slotkeeper.exchange import credentials as door_module
from slotkeeper.exchange.credentials import LASTS, REFUSAL_LASTS, Caller, Door, KeyCheck, Refusal, key_in
from slotkeeper.exchange.forwarding import UpstreamAnswer
from slotkeeper.exchange.keys import OwnKeys
from slotkeeper.scheduler.types import EngineId

ENGINE = EngineId("http://engine")
CAME = 5.0
GOOD, BAD = {"Authorization": "Bearer good"}, {"Authorization": "Bearer bad"}


def said(status: int) -> UpstreamAnswer:
    """Return an answer of an engine to GET /props."""
    return UpstreamAnswer(status, "Said", (("Server", "llama.cpp"),), b"no")


class Engine:
    """Upstream, driver, engines and link in one object."""

    def __init__(self, key: str | None = "Bearer good") -> None:
        self.key, self.status, self.asked, self.clock = key, 0, 0, 1000.0
        self.engine, self.process, self.health, self.doubtful = ENGINE, "one", Health.OK, False
        self.up, self.pulse, self.address = True, Pulse(), EngineAddress.of(ENGINE)
        self.links = {ENGINE: self}
        self.engines, self.upstreams = self, [self]
        self.let: list[dict[str, str]] = []
        self.door = self.new_door()

    def new_door(self, **more: Any) -> Door:
        return Door(self, self, now=lambda: self.clock, **more)  # type: ignore[arg-type]

    def outgoing(self, request: Any, body: bytes | None, request_id: str) -> Any:
        assert (body, request_id) == (None, "")
        return request.headers

    async def look(self, base: str, path: str, headers: Any, *, seconds: float) -> UpstreamAnswer:
        assert (base, path) == (ENGINE, "/running" if self.health is Health.SWAPPER else "/props")
        assert seconds > 0
        self.asked += 1
        if self.status < 0:
            raise UpstreamFault("gone")
        fits = self.key is None or key_in(headers) in self.key.removeprefix("Bearer ").split(",")
        return said(self.status or (200 if fits else 401))

    async def awake(self, since: float) -> None:
        assert since == CAME

    async def folder_tried(self) -> None:
        """Report the folder as open at once."""

    def expects(self) -> bool:
        return self.status < 0

    @property
    def judges(self) -> bool:
        return self.up

    def kick(self) -> None:
        pass

    def let_in(self, auth: dict[str, str]) -> None:
        self.let.append(auth)

    async def caller(
        self, headers: dict[str, str], door: Door | None = None, *, later: bool = False
    ) -> Caller:
        request = make_mocked_request("POST", "/completion", headers=headers)
        await (door or self.door).judge(request, since=CAME, later=later)
        return (door or self.door).caller(request)

    async def judge(self, headers: dict[str, str], *, later: bool = False) -> Any:
        request = make_mocked_request("POST", "/completion", headers=headers)
        return await self.door.judge(request, since=CAME, later=later)


async def test_llama_swap_is_asked_on_its_own_route():
    engine = Engine()
    engine.health = Health.SWAPPER
    assert await engine.judge(GOOD) is KeyCheck.LET_IN
    assert isinstance(await engine.judge(BAD), Refusal)


@pytest.mark.parametrize("status", [302, 400, 404, 405, 429, 503])
async def test_an_answer_that_neither_accepts_nor_refuses_lets_nobody_in(status):
    engine = Engine()
    engine.status = status  # of a gateway in front of the engine, or of another server
    for headers in ({}, GOOD, BAD):
        assert await engine.judge(headers) is KeyCheck.UNSURE
    assert engine.let == []
    engine.status = 0
    assert await engine.judge(GOOD) is KeyCheck.LET_IN
    assert isinstance(await engine.judge(BAD), Refusal)


@pytest.mark.parametrize("status", [-1, 302, 404, 429, 500, 503])
async def test_while_the_engine_cannot_check_keys_only_clients_let_in_before_are_let_in(status):
    engine = Engine()
    assert await engine.judge(GOOD) is KeyCheck.LET_IN
    engine.status, engine.clock = status, engine.clock + LASTS
    assert await engine.judge(GOOD) is KeyCheck.LET_IN
    assert await engine.judge(BAD) is KeyCheck.UNSURE


async def test_an_engine_without_a_key_is_asked_once_for_each_process():
    engine = Engine(key=None)
    for headers in ({}, GOOD, BAD) * 20:
        assert await engine.judge(headers) is KeyCheck.LET_IN
        engine.clock += LASTS
    assert engine.asked == 1
    assert engine.let == []
    engine.process, engine.key = "two", "Bearer good"
    assert isinstance(await engine.judge(BAD), Refusal)


async def test_a_valid_key_is_checked_again_after_a_minute():
    engine = Engine()
    for _ in range(10):
        assert await engine.judge(GOOD | {"X-Other": "x"}) is KeyCheck.LET_IN
    assert engine.asked == 2  # once without a key, and once with this key
    assert engine.let == [GOOD], "the sidecar may use the key"
    engine.clock += LASTS
    assert await engine.judge(GOOD) is KeyCheck.LET_IN
    assert engine.asked == 3
    engine.key, engine.clock = "Bearer other", engine.clock + LASTS
    assert isinstance(await engine.judge(GOOD), Refusal), "it was revoked"


async def test_a_refusal_is_that_of_the_engine_and_is_remembered_for_seconds():
    engine = Engine()
    for _ in range(10):
        said = await engine.judge(BAD)
        assert said == Refusal(401, "Said", (("Server", "llama.cpp"),), b"no")
    assert engine.asked == 2
    assert engine.let == []
    engine.clock += REFUSAL_LASTS
    engine.key = "Bearer bad"
    assert await engine.judge(BAD) is KeyCheck.LET_IN


@pytest.mark.parametrize("key", [None, "Bearer good"])
async def test_a_client_let_in_before_the_engine_was_lost_is_checked_again_when_it_is_back(key):
    engine = Engine(key)
    engine.door = engine.new_door(namespaces=True, secret=lambda: b"secret")
    assert await engine.judge(GOOD, later=True) is KeyCheck.LET_IN
    known_as = await engine.caller(GOOD)
    engine.status, engine.process, engine.health = -1, "", Health.DOWN
    assert await engine.judge(GOOD, later=True) is KeyCheck.LATER
    assert await engine.caller(GOOD, later=True) == known_as
    assert await engine.judge(GOOD) is KeyCheck.UNSURE
    assert await engine.judge(BAD, later=True) is (KeyCheck.UNSURE if key else KeyCheck.LATER)
    engine.status, engine.process, engine.key = 0, "two", "Bearer other"
    assert isinstance(await engine.judge(GOOD, later=True), Refusal)


async def test_remembered_keys_are_limited_in_number_and_stored_as_digests(monkeypatch):
    monkeypatch.setattr(door_module, "MOST_KNOWN", 5)
    monkeypatch.setattr(door_module, "MOST_REFUSED", 5)
    engine = Engine()
    for number in range(50):
        engine.key = "Bearer good" if number % 2 else "Bearer none"
        await engine.judge({"Authorization": "Bearer good", "Cookie": str(number)})
    kept = engine.door._known, engine.door._refused
    assert [len(one) for one in kept] == [5, 5]
    assert "good" not in repr(kept)


async def test_repeated_credential_headers_are_checked_in_their_order():
    """The engine reads the first one, so the result for one order does not hold for the other."""
    engine = Engine()
    bad, good = ("Authorization", "Bearer bad"), ("Authorization", "Bearer good")
    assert await engine.judge([good, bad]) is KeyCheck.LET_IN  # type: ignore[arg-type]
    assert isinstance(await engine.judge([bad, good]), Refusal)  # type: ignore[arg-type]


def test_the_refusal_of_the_engine_is_passed_on_unchanged():
    refusal = Refusal(401, "Unauthorized", (("Content-Type", "application/json; charset=utf-8"),), b"{}")
    response = refusal.response("id")
    assert response.headers.getall("Content-Type") == ["application/json; charset=utf-8"]
    assert response.headers["X-Request-Id"] == "id"
    assert (response.status, response.body) == (401, b"{}")


async def test_until_it_has_let_a_client_in_the_engine_checks_each_request_itself():
    engine = Engine()
    engine.up = False
    assert await engine.judge(BAD) is KeyCheck.UNSURE
    engine.up = True
    assert isinstance(await engine.judge(BAD), Refusal)


# -- queue and namespace of a request ------------------------------------------------------------------

ONE, OTHER = {"Authorization": "Bearer sesame"}, {"Authorization": "Bearer other"}


async def test_a_verified_key_has_one_queue_whichever_header_carries_it():
    engine = Engine(key="Bearer sesame,other")
    one, other = await engine.caller(ONE), await engine.caller(OTHER)
    assert one.line != other.line
    assert await engine.caller({"X-Api-Key": "sesame"}) == one
    assert "sesame" not in repr(one)


async def test_clients_without_a_verified_key_are_queued_by_address():
    engine = Engine(key=None)
    callers = [await engine.caller({"Authorization": f"Bearer {number}"}) for number in range(9)]
    assert len(set(callers)) == 1
    engine = Engine()
    engine.up = False  # it cannot check keys
    unsure = await engine.caller(BAD, engine.new_door(namespaces=True))
    assert (unsure.line, unsure.namespace) == (callers[0].line, "")


async def test_each_key_has_its_own_namespace_if_that_is_set():
    engine = Engine(key="Bearer sesame,other")
    door = engine.new_door(namespaces=True, secret=lambda: b"secret")
    one, other = [(await engine.caller(key, door)).namespace for key in (ONE, OTHER)]
    assert len({one, other, ""}) == 3
    again = engine.new_door(namespaces=True, secret=lambda: b"secret")
    assert (await engine.caller(ONE, again)).namespace == one, "a restart changed it"
    elsewhere = engine.new_door(namespaces=True, secret=lambda: None)
    assert (await engine.caller(ONE, elsewhere)).namespace not in {one, ""}
    off = engine.new_door(namespaces=False)
    assert [(await engine.caller(key, off)).namespace for key in (ONE, OTHER)] == ["", ""]


async def test_the_first_request_uses_the_secret_of_a_slot_folder_that_is_being_opened(monkeypatch):
    """Otherwise the request would find none of its snapshots."""
    engine, found = Engine(), list[bytes]()

    async def opens() -> None:
        await asyncio.sleep(0)
        found.append(b"secret")

    monkeypatch.setattr(engine, "folder_tried", opens)
    waits = engine.new_door(namespaces=True, secret=lambda: next(iter(found), None))
    before = engine.new_door(namespaces=True, secret=lambda: b"secret")
    assert (await engine.caller(GOOD, waits)).namespace == (await engine.caller(GOOD, before)).namespace


async def test_namespaces_use_the_secret_of_a_slot_folder_that_is_opened_later():
    engine, found = Engine(), list[bytes]()
    door = engine.new_door(namespaces=True, secret=lambda: next(iter(found), None))
    without = [(await engine.caller(GOOD, door)).namespace for _ in range(2)]
    assert without[0] == without[1] != ""
    found.append(b"secret")
    before = engine.new_door(namespaces=True, secret=lambda: b"secret")
    assert (await engine.caller(GOOD, door)).namespace == (await engine.caller(GOOD, before)).namespace


async def test_a_second_verified_key_turns_namespaces_on():
    engine = Engine(key="Bearer sesame,other")
    door = engine.new_door(namespaces=None)
    assert [(await engine.caller(key, door)).namespace for key in (ONE, BAD, ONE)] == [""] * 3
    assert not door.namespaces
    assert (await engine.caller(OTHER, door)).namespace
    assert (await engine.caller(ONE, door)).namespace
    assert door.namespaces


# -- the key list of the sidecar -----------------------------------------------------------------------


def key_list(folder: Path) -> OwnKeys:
    path = folder / "keys.toml"
    path.write_text(
        '[alice]\nkey = "a-long-key-of-alice"\n[root]\nkey = "a-long-key-of-root"\noperator = true\n'
    )
    path.chmod(0o600)
    return OwnKeys(path)


ALICE, ROOT = {"X-Api-Key": "a-long-key-of-alice"}, {"Authorization": "Bearer a-long-key-of-root"}


def refused(door: Door, method: str, path: str, headers: dict[str, str]) -> int | None:
    request = make_mocked_request(method, path, headers=headers)
    try:
        door.admit(request, classify(method, request.path), request.path, request.path)
    except ClientFault as fault:
        return fault.status
    return None


@pytest.mark.parametrize(
    ("method", "path", "statuses"),
    [
        ("POST", "/v1/chat/completions", [401, 401, None, None]),
        ("POST", "/tokenize", [401, 401, None, None]),
        ("GET", "/v1/models", [401, 401, None, None]),
        ("GET", "/slots", [401, 401, 403, None]),
        ("POST", "/slots/0?action=save", [401, 401, 403, None]),
        ("GET", "/", [401, 401, 403, None]),
        ("GET", "/metrics", [401, 401, 403, None]),
        ("GET", "/props", [401, 401, None, None]),
        ("POST", "/props", [401, 401, 403, None]),
        ("POST", "/lora-adapters", [401, 401, 403, None]),
        ("POST", "/models/load", [401, 401, 403, None]),
        ("POST", "/models/unload", [401, 401, 403, None]),
        ("POST", "/tools", [401, 401, 403, None]),
        ("GET", "/cors-proxy?url=x", [401, 401, 403, None]),
        ("GET", "/v1/stream?conv_id=x", [401, 401, 403, None]),
        ("POST", "/v1/streams/lookup", [401, 401, 403, None]),
        ("POST", "/v1/chat/completions/control", [401, 401, 403, None]),
        ("GET", "/v1/models?reload=", [401, 401, None, None]),
        ("GET", "/v1/models?reload=0", [401, 401, 403, None]),
        ("GET", "/health", [None] * 4),
        ("OPTIONS", "/v1/chat/completions", [None] * 4),
    ],
)
async def test_the_key_list_decides_what_each_key_may_do(tmp_path, method, path, statuses):
    door = Engine().new_door(keys=key_list(tmp_path))
    assert [refused(door, method, path, key) for key in ({}, BAD, ALICE, ROOT)] == statuses


async def test_the_name_of_a_listed_key_is_its_namespace_and_queue(tmp_path):
    engine = Engine(key=None)
    door = engine.new_door(keys=key_list(tmp_path), namespaces=None)
    callers = []
    for headers in (ALICE, ROOT):
        request = make_mocked_request("POST", "/completion", headers=headers)
        door.admit(request, Api.COMPLETION, "/completion", "/completion")
        assert await door.judge(request, since=CAME) is KeyCheck.LET_IN
        callers.append(door.caller(request))
        assert door.lent(request) == {}
    assert [caller.namespace for caller in callers] == ["alice", "root"]
    assert callers[0].line != callers[1].line


async def test_a_client_of_our_own_list_may_wait_for_an_engine_that_was_never_asked(tmp_path):
    engine = Engine()
    engine.status = -1
    door = engine.new_door(keys=key_list(tmp_path))
    request = make_mocked_request("POST", "/completion", headers=ALICE)
    assert await door.judge(request, since=CAME, later=True) is KeyCheck.LATER


async def test_an_engine_that_refuses_the_key_of_the_sidecar_is_an_upstream_fault(tmp_path):
    engine = Engine()
    door = engine.new_door(keys=key_list(tmp_path))
    request = make_mocked_request("POST", "/completion", headers=ALICE)
    for up in (True, False):
        engine.up = up
        with pytest.raises(UpstreamFault, match="--engine-api-key"):
            await door.judge(request, since=CAME)
    assert engine.let == []
