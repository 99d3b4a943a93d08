"""Records of requests as the admin port returns them, and a fake admin port with documents of a test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from aiohttp import web
from aiohttp.test_utils import TestServer

from slotkeeper.api.answers.answer import Waited, waits
from slotkeeper.conversation.divergence import Cause
from slotkeeper.conversation.layout import Section
from slotkeeper.conversation.likeness import RequestKind
from slotkeeper.conversation.naming import Name
from slotkeeper.conversation.rules.apply import ShownChange
from slotkeeper.conversation.rules.base import Mode, RuleName
from slotkeeper.observe.request_record import Decision, Option, PromptDivergence, Record, RequestStage
from slotkeeper.scheduler.requests.figures import Loss, Lost, Sums, usage_of
from slotkeeper.scheduler.types import Reason

ENGINE: Final = "http://127.0.0.1:8081"
CAME: Final = 1_000_000_000.0  # 2001-09-09T01:46:40Z

Document = dict[str, Any]


def record(number: int = 1, **given: Any) -> Record:
    """Return a record of a request that has just arrived; `given` are further fields."""
    known: Document = {
        "route": "chat",
        "request_id": f"request-{number:08}",
        "received": CAME + number,
        "at": 10.0,
        "name": Name("opencode", 3, title="Fix the importer"),
    }
    return Record(**known | counted(**given))


def counted(**given: Any) -> Document:
    """Return the counts of a record: `cached` and `planted` are the engine's figures."""
    usage = usage_of(given.get("prompt_tokens"), given.pop("cached", None), planted=given.pop("planted", 0))
    return {"usage": usage} | given


def ended(number: int = 1, **given: Any) -> Record:
    """Return a record of an answered request that computed nothing twice."""
    basis: Document = {
        "conversation": 3,
        "kind": RequestKind.MAIN_TURN,
        "engine": ENGINE,
        "slot": 1,
        "outcome": "ok",
        "status": 200,
        "prompt_tokens": 12_000,
        "cached": 11_000,
        "oracle": 1_000,
        "predicted": 11_000,
        "generated": 20,
        "first_token": 0.5,
        "seconds": 1.25,
        "reused_seconds": 9.0,
    }
    return record(number, **(basis | given))


def rewritten(number: int = 1, **given: Any) -> Record:
    """Return a record of a request whose client put a new date in front of its history."""
    place = Option(reason=Reason.PREFIX, engine=ENGINE, slot=1, reuse=20, price=11_980.0, steps=("plant",))
    other = Option(reason=Reason.COLD, engine=ENGINE, slot=0, reuse=0, price=12_345.0)
    basis: Document = {
        "cached": 20,
        "predicted": 20,
        "oracle": 11_980,
        "decision": Decision(chosen=place, beaten=(other,), rate=1000.0, held=11_500, common=20),
        "divergence": PromptDivergence(
            cause=Cause.DATE,
            section=Section.SYSTEM,
            message=0,
            token=20,
            tokens=11_400,
            seconds=11.4,
            rule=RuleName.DATE,
            fixed=False,
        ),
    }
    found = ended(number, **(basis | given))
    found.add(RequestStage.PARSE, 10.0, 10.001)
    found.add(RequestStage.PLANT, 10.25, 10.75, tokens=500, note="plant")
    found.add(RequestStage.PREFILL, 10.75, 11.0)
    return found


def lost(number: int = 1) -> Record:
    return ended(number, cached=3_000, lost=Lost(Loss.OVERWRITTEN, 8_000), decision=None)


def change(mode: Mode, before: str, after: str) -> ShownChange:
    return ShownChange(RuleName.DATE, mode, "messages[0].content", before, after)


def state(**given: Any) -> Document:
    """Return a state with one engine, one idle slot and one busy slot."""
    sums: Document = {
        "requests": 12,
        "prompt_tokens": 1000,
        "reused": 800,
        "computed": 200,
        "oracle": 190,
        "client": 150,
        "plant": 50,
        "idle": 30,
        "repeated": 10,
        "reused_seconds": 13.0,
        "step_seconds": 0.5,
    }
    figures = Sums(**sums).shown() | {"unknown_text": ""}
    idle = {
        "slot": 0,
        "state": "idle",
        "held_tokens": 2048,
        "checkpoints": [100, 120],
        "request": "request-00000001",
        "conversation": 3,
        "name": "opencode #3: Fix the importer",
        "about": "Fix the importer",
        "idle_seconds": 65.0,
        "saved": True,
    }
    empty = {"held_tokens": 0, "checkpoints": [], "saved": False}
    unknown = dict.fromkeys(("request", "conversation", "name", "about", "idle_seconds"))
    running = {"slot": 1, "state": "running", **empty, **unknown}
    engine = {
        "engine": ENGINE,
        "up": True,
        "health": "ok",
        "state": "up",
        "state_text": "is up",
        "down_seconds": None,
        "labels": {},
        "draining": False,
        "drained": False,
        "failing": False,
        "build": "b11549",
        "memory": "hybrid",
        "context_tokens": 8192,
        "prefill_tokens_per_second": 812.3,
        "checkpoint_limit": 32,
        "adapters": "",
        "flags": [{"flag": "--checkpoint-min-step", "value": 0, "how": "canary"}],
        "slots": [idle, running],
        "ram_cache_entries_tokens": [],
    }
    basis: Document = {
        "version": "1.2.3",
        "draining": False,
        "uptime_seconds": 7200.0,
        "queued": 4,
        "running": [],
        "service": {"state": "placed", "text": ""},
        "clients": [],
        "data_port": {"scheme": "http", "address": "127.0.0.1:8080", "port": 8080, "everywhere": False},
        "why_text": False,
        "totals": figures,
        "history": [figures | {"at": CAME}],
        "waits": waits([Waited(0.5, None, None), Waited(2.0, 0.25, 1.5)]).shown(),
        "tiers": [{"tier": "hot", "snapshots": 2, "bytes": 1 << 20, "budget_bytes": 4 << 20, "advice": ""}],
        "engines": [engine],
    }
    return basis | given


class FakeAdminPort:
    """The admin port's answers by path, which a test may change at any time, and its requests."""

    def __init__(self, documents: dict[str, Any]) -> None:
        self.documents = documents
        self.asked: list[str] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(str(request.rel_url))
        if request.path not in self.documents:
            return web.json_response({"error": "there is none"}, status=404)
        return web.json_response(self.documents[request.path])


@asynccontextmanager
async def admin(documents: dict[str, Any]) -> AsyncIterator[FakeAdminPort]:
    said = FakeAdminPort(documents)
    app = web.Application()
    app.router.add_get("/{path:.*}", said.answer)
    async with TestServer(app) as server:
        said.url = str(server.make_url("")).rstrip("/")
        yield said
