"""Documents of the admin port: engines, slots, figures, tiers, the prompt tree, and the last requests.

Also the routes that drain and undrain an engine.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import Any, Final

from aiohttp import web

from slotkeeper import __version__
from slotkeeper.admin.guard import answer, field_of, number, refused
from slotkeeper.api.answers.latency import waits
from slotkeeper.api.head import masked
from slotkeeper.conversation.rules.apply import ShownChange
from slotkeeper.engine.answers import EngineError, EngineGoneError
from slotkeeper.observe.log import get_logger
from slotkeeper.observe.request_record import (
    RUNNING,
    Decision,
    History,
    Option,
    PromptDivergence,
    Record,
    Span,
    moment,
)
from slotkeeper.observe.sentences import FEW, place, sentences, verdict
from slotkeeper.observe.states import (
    ENGINE_TEXTS,
    Doing,
    Moment,
    Spent,
    service_text,
    stages_text,
    unknown_text,
    wait_text,
)
from slotkeeper.runtime.driver import Driver
from slotkeeper.runtime.link import EngineLink
from slotkeeper.scheduler.requests.figures import Usage
from slotkeeper.scheduler.requests.pending import Wait, Weighed
from slotkeeper.scheduler.slots.engine_model import FlagSeen, Memory
from slotkeeper.scheduler.slots.slot_contents import SlotContents, Tier
from slotkeeper.scheduler.slots.table import EngineTable
from slotkeeper.scheduler.snapshots.budgets import Limits
from slotkeeper.scheduler.types import RequestId, id_of
from slotkeeper.values import Address

NOTHING_KNOWN: Final[dict[str, Any]] = {
    "memory": Memory.UNKNOWN.value,
    "context_tokens": 0,
    "pool": None,
    "checkpoint_limit": 0,
    "adapters": "",
    "flags": [],
    "prefill_tokens_per_second": None,
    "slots": [],
    "ram_cache_entries_tokens": [],
}
TWIGS: Final = 200  # edges of the prompt tree in an answer, unless the query names another limit
MOST_TWIGS: Final = 2000
EMPTY_SLOT: Final[dict[str, Any]] = {
    "held_tokens": 0,
    "checkpoints": [],
    "request": None,
    "conversation": None,
    "name": None,
    "about": None,
    "idle_seconds": None,
    "saved": False,
}
FILES: Final = 200  # snapshots that are searched for in the tree

Document = dict[str, Any]
Latest = dict[tuple[str | None, int | None], Record]  # by engine and slot


def flag(seen: FlagSeen) -> Document:
    """Return the document of one of an engine's flags, and how it is known."""
    return {"flag": seen.flag, "value": seen.value, "how": seen.how.value}


def membership(driver: Driver, link: EngineLink) -> dict[str, Any]:
    """Return the document of an engine's address, labels and use."""
    table = driver.placement.tables.get(link.engine)
    return {
        "address": link.address.base,
        "labels": dict(link.labels),
        "draining": link.draining,
        "drained": driver.placement.drained(link.engine),
        "failing": table is not None and table.up and table.failing,
    }


class StateRoutes:
    """`/api/state` and `/api/tree`."""

    def __init__(self, driver: Driver, history: History, limits: Limits, *, why_text: bool) -> None:
        self._driver = driver
        self._history = history
        self._engine_wait = limits.engine_wait
        self._why_text = why_text
        self._began = time.monotonic()
        self.draining = False
        self.data_port: Address | None = None  # set when it listens
        self.scheme = "http"  # of the data port's URL

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/api/state", self._state), web.get("/api/tree", self._tree)]

    async def _state(self, _: web.Request) -> web.Response:
        placement, now = self._driver.placement, self._driver.now()
        latest, totals = self._last_in_slots(), self._history.totals
        service = self._driver.membership.service(placement)  # what happens to a request that arrives now
        return answer(
            {
                "version": __version__,
                "draining": self.draining,
                "uptime_seconds": round(time.monotonic() - self._began, 1),
                "tasks": len(asyncio.all_tasks()),
                "queued": placement.queued,
                "service": {"state": service.value, "text": service_text(service, self._engine_wait)},
                "data_port": self._data_port(),
                "running": self._running(),
                "clients": [client.shown(now) for client in self._driver.journal.clients],
                "why_text": self._why_text,
                "totals": {**totals.shown(), "unknown_text": unknown_text(totals)},
                "waits": waits(one.waited for one in self._driver.journal).shown(),
                "history": list(self._history.shown()),
                "tiers": self._tiers(),
                "engines": [
                    self._engine(link, placement.tables.get(link.engine), latest, now)
                    for link in self._driver.links.values()
                    if not link.routes
                ],
            }
        )

    def _data_port(self) -> Document | None:
        """Return the address for clients; `everywhere`: any other address of this machine works too."""
        if self.data_port is None:
            return None
        reached = self.data_port.reached
        return {
            "scheme": self.scheme,
            "address": str(reached),
            "port": reached.port,
            "everywhere": reached != self.data_port,
        }

    def _last_in_slots(self) -> Latest:
        """Return the request of each slot: the one at work there, else the newest recorded one."""
        latest: Latest = {(one.engine, one.slot): one for one in reversed(tuple(self._driver.journal))}
        for record in self._driver.journal.running():
            if (place := place_of(self._driver, record)) != (None, None):
                latest[place] = record
        return latest

    def _tiers(self) -> list[Document]:
        if self._driver.snapshots is None:
            return []
        catalog, budgets = self._driver.placement.catalog, self._driver.placement.budgets
        return [
            {
                "tier": tier.value,
                "snapshots": catalog.count(tier),
                "bytes": catalog.size(tier),
                "budget_bytes": budgets.shown(tier),
                "advice": budgets.advice if tier is Tier.HOT else "",
            }
            for tier in Tier
        ]

    def _running(self) -> list[Document]:
        """Return unfinished requests: those that wait in the order of the queue, then the newest first."""
        places = places_in(self._driver)
        found = [
            {
                **asked_by(record),
                **dict(zip(("engine", "slot"), place_of(self._driver, record), strict=True)),
                "seconds": round(self._driver.now() - record.at, 1),
                "now": moment.shown(),
                **time_of(record, self._driver.now()),
            }
            for record in self._driver.journal.running()
            if (moment := moment_of(self._driver, record, places))
        ]
        return sorted(found, key=lambda one: (one["now"]["place"] is None, one["now"]["place"] or 0))

    def _engine(self, link: EngineLink, table: EngineTable | None, latest: Latest, now: float) -> Document:
        """Return the document of an engine, with few fields if it was never up."""
        known: Document = {
            "engine": link.engine,
            "model": link.address.model or None,
            **membership(self._driver, link),
            "up": bool(table and table.up),
            "health": link.health.value,
            "state": (state := self._driver.membership.state(link, self._driver.placement)).value,
            "state_text": ENGINE_TEXTS[state],
            "down_seconds": None if link.down_since is None else round(max(0.0, now - link.down_since), 1),
            "build": link.build,
        }
        if table is None:
            return known | NOTHING_KNOWN
        rate = table.rates.prefill
        return known | {
            "memory": table.traits.memory.value,
            "context_tokens": table.traits.n_ctx,
            "pool": self._driver.placement.pool_of(table),
            "checkpoint_limit": table.traits.checkpoint_cap,
            "adapters": table.traits.adapter_set,
            "flags": [flag(seen) for seen in table.traits.flags_seen()],
            "prefill_tokens_per_second": round(rate.mean, 1) if rate.measured else None,
            "slots": [
                {
                    "slot": slot,
                    "state": state.value,
                    **self._held(table, contents, latest.get((table.engine, slot)), now),
                }
                for slot, (state, contents) in enumerate(zip(table.states, table.shadow.slots, strict=True))
            ],
            "ram_cache_entries_tokens": [entry.total for entry in table.shadow.ram],
        }

    def _held(
        self, table: EngineTable, contents: SlotContents | None, last: Record | None, now: float
    ) -> Document:
        named = {
            "request": last.request_id if last else None,
            "conversation": last.conversation if last else None,
            "name": str(last.name) if last else None,
            "about": (last.name.words or None) if last else None,
        }
        if contents is None:
            at_work = last is not None and last.outcome == RUNNING
            return EMPTY_SLOT | (named if at_work else {})
        covered = self._driver.placement.catalog.covers(contents, table.traits)
        return {
            "held_tokens": contents.total,
            "checkpoints": [checkpoint.at for checkpoint in contents.checkpoints],
            **named,
            "idle_seconds": round(max(0.0, now - contents.used), 1),
            "saved": covered * 2 > contents.total,
        }

    async def _tree(self, request: web.Request) -> web.Response:
        placement, now = self._driver.placement, self._driver.now()
        model = placement.busiest
        tree = placement.tree(model)
        twigs = tree.recent_edges(min(MOST_TWIGS, number(request, "limit", TWIGS)))
        slots: dict[int | None, list[Document]] = {}
        for table in placement.tables.values():
            for slot, contents in enumerate(table.shadow.slots):
                if contents and table.model == model:
                    place = {"engine": table.engine, "slot": slot}
                    slots.setdefault(tree.twig(contents.tokens), []).append(place)
        files = Counter(tree.twig(snapshot.tokens) for snapshot in islice(placement.catalog, FILES))
        return answer(
            {
                "tokens": tree.tokens,
                "leaves": tree.leaves,
                "nodes": [
                    {
                        "id": str(twig.id),
                        "parent": str(twig.parent) if twig.parent is not None else None,
                        "begin": twig.begin,
                        "end": twig.end,
                        "ways": twig.ways,
                        "passed": twig.passed,
                        "idle_seconds": round(max(0.0, now - twig.used), 1),
                        "slots": slots.get(twig.id, []),
                        "snapshots": files[twig.id],
                    }
                    for twig in twigs
                ],
            }
        )


# -- draining an engine ----------------------------------------------------------------------------------


class EngineRoutes:
    """`POST /api/drain` and `/api/undrain`. The body names the engine: {"engine": NAME}."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/api/drain", self._drain), web.post("/api/undrain", self._undrain)]

    async def _drain(self, request: web.Request) -> web.Response:
        return await self._set(request, drain=True)

    async def _undrain(self, request: web.Request) -> web.Response:
        return await self._set(request, drain=False)

    async def _set(self, request: web.Request, *, drain: bool) -> web.Response:
        members, word = self._driver.membership, _engine_in(await request.read())
        link = members.find(word)
        if link is None:
            known = ", ".join(link.engine for link in self._driver.engines.upstreams)
            raise refused(web.HTTPNotFound, f"there is no engine {word[:100]!r}; there is {known}")
        members.drain(link, drain=drain)
        return answer({"engine": link.engine, **membership(self._driver, link)})


def _engine_in(body: bytes) -> str:
    word = field_of(body, "engine")
    if not word or not isinstance(word, str):
        raise refused(web.HTTPBadRequest, 'the body must be {"engine": "NAME"}')
    return word


# -- the last requests -----------------------------------------------------------------------------------


def places_in(driver: Driver) -> dict[RequestId, int]:
    """Return the queued requests with their places. Called once for an answer, not for each request."""
    return {request: place for place, request in enumerate(driver.placement.line, start=1)}


def moment_of(driver: Driver, record: Record, places: dict[RequestId, int]) -> Moment | None:
    """Return the progress of a request; None if it has ended."""
    ended = record.outcome != RUNNING
    return None if ended else replace(_progress(driver, record, places), priority=record.priority)


def place_of(driver: Driver, record: Record) -> tuple[str | None, int | None]:
    """Return the engine and the slot where a request is or was at work; None for what is not known."""
    pending = driver.placement.pending(record.key) if record.outcome == RUNNING else None
    if pending is None or pending.plan is None:
        return record.engine, record.slot
    slot = pending.slot
    if slot is None and pending.plan.pinned:
        slot = pending.plan.slot
    return pending.plan.table.engine, slot


def _progress(driver: Driver, record: Record, places: dict[RequestId, int]) -> Moment:
    pending = driver.placement.pending(record.key)
    prompt = None if pending is None or pending.prompt is None else len(pending.prompt)
    found = moment(record, prompt, driver.now())
    if found.doing is not Doing.QUEUED:
        return found
    waiting = driver.placement.waiting(record.key)
    return replace(
        found,
        place=places.get(record.key),
        wait=waiting.wait if waiting else _UNPLACED.get(record.stage),
        behind=tuple(map(id_of, waiting.behind)) if waiting else (),
    )


# What a request waits for that is not in the queue yet.
_UNPLACED: Final[dict[Spent | None, Wait]] = {Spent.ENGINE: Wait.ENGINE, Spent.SWAP: Wait.MODEL}


# -- their documents: no text of a prompt ----------------------------------------------------------------


def summary(record: Record) -> Document:
    """Return the document of one line of a list. Tokens are the engine's counts; times are in seconds."""
    divergence, lost, decision = record.divergence, record.lost, record.decision
    saved = record.saved_seconds
    return {
        **asked_by(record),
        "route": record.route,
        "outcome": record.outcome,
        "status": record.status,
        "client": record.client,
        "conversation": record.goes_on,
        "named": record.named,
        "kind": record.kind.value if record.kind else None,
        "engine": record.engine,
        "slot": record.slot,
        "decision": decision.chosen.reason.value if decision else None,
        "prompt_tokens": record.prompt_tokens,
        **_counts(record.usage),
        "oracle": record.oracle,
        "oracle_unknown": record.unknown.value if record.unknown else None,
        "predicted": record.predicted,
        "generated": record.generated,
        "repeated": record.repeated,
        "priority": record.priority.value,
        "seconds": record.seconds,
        "first_token_seconds": record.first_token,
        "stall_seconds": record.stall,
        "saved_seconds": None if saved is None else round(saved, 6),
        "cause": divergence.cause.value if divergence else None,
        "section": divergence.section.value if divergence and divergence.section else None,
        "where": place(divergence) if divergence else None,
        "lost": lost.why.value if lost else None,
        "verdict": verdict(record),
    }


def _counts(usage: Usage | None) -> Document:
    if usage is None:
        return {"reused": None, "computed": None, "planted": 0, "prepared": 0, "cached": None}
    return {
        "reused": usage.reused,
        "computed": usage.computed,
        "planted": usage.planted,
        "prepared": usage.prepared,
        "cached": usage.cached,
    }


def detail(record: Record, taker: Record | None = None) -> Document:
    """Return the document of one request. `taker`: the request that took its conversation's slot."""
    return summary(record) | {
        "body_bytes": record.body_bytes,
        "explanation": sentences(record, taker),
        "timeline": [_span(span) for span in sorted(record.spans, key=lambda span: span.begin)],
        "queued": _queued(record),
        "choice": _choice(record.decision) if record.decision else None,
        "parting": _divergence_at(record.divergence) if record.divergence else None,
        "lost_tokens": record.lost.tokens if record.lost else 0,
        "slot_taken_by": taker.request_id if taker else None,
        "changes": [_change(change) for change in record.changes],
        "forms": _forms(record.weighed) if record.weighed else None,
        **_acts(record),
    }


def time_of(record: Record, now: float) -> Document:
    """Return the stage of the request, and the seconds in each so far; `now` is on the driver's clock."""
    spent, waited = record.spent(now), record.to_first_token(now)
    return {
        "stage": record.stage.value if record.stage else None,
        "stages": {stage.value: round(spent[stage], 6) for stage in Spent if stage in spent},
        "stages_text": stages_text(spent),
        "to_first_token_seconds": None if waited is None else round(waited, 6),
    }


def _queued(record: Record) -> list[Document]:
    """Return what the request waited for in the queue, in the order in which that began."""
    return [
        {
            "wait": wait.value,
            "text": wait_text(wait, [*queued.behind]),
            "seconds": round(queued.seconds, 6),
            "behind": [*queued.behind],
        }
        for wait, queued in record.queued.items()
    ]


def asked_by(record: Record) -> Document:
    """Return which request it is, of which conversation and client, as in every document."""
    return {
        "id": record.request_id,
        "came": _moment(record.received),
        "name": str(record.name),
        "agent": record.name.agent,
        "about": record.name.words or None,
        "conversation_began": _moment(began(record)),
        "model": record.model,
    }


def began(record: Record) -> float:
    """Return when the request's conversation began, in seconds since the epoch."""
    first = record.name.began
    return record.received if first is None else record.received - record.at + first


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _span(span: Span) -> Document:
    return {
        "stage": span.stage.value,
        "begin": round(span.begin, 6),
        "end": round(span.end, 6),
        "tokens": span.tokens,
        "note": span.note,
    }


def _choice(decision: Decision) -> Document:
    return {
        "chosen": _option(decision.chosen, decision.rate),
        "beaten": [_option(option, decision.rate) for option in decision.beaten],
        "held_tokens": decision.held,
        "common_tokens": decision.common,
    }


def _option(option: Option, rate: float) -> Document:
    seconds = option.seconds  # with several engines: includes the queue there and the speed of answers
    if seconds is None and rate:
        seconds = option.price / rate
    return {
        "decision": option.reason.value,
        "engine": option.engine,
        "slot": option.slot,
        "reuse_tokens": option.reuse,
        "price_tokens": round(option.price, 1),
        "price_seconds": None if seconds is None else round(seconds, 4),
        "steps": list(option.steps),
    }


def _divergence_at(divergence: PromptDivergence) -> Document:
    """Return the document of a divergence; the caller sets `text`."""
    return {
        "cause": divergence.cause.value,
        "section": divergence.section.value if divergence.section else None,
        "message": divergence.message,
        "where": place(divergence),
        "token": divergence.token,
        "repeated_tokens": divergence.tokens,
        "seconds": divergence.seconds,
        "rule": divergence.rule.value if divergence.rule else None,
        "fixed": divergence.fixed,
        "text": None,
    }


def _forms(weighed: Weighed) -> Document:
    """Return the prices of the client's own form and of the form that rules changed.

    They are tokens to compute, at the time of the decision; null: it was decided without a price.
    """
    own, changed = (None if price is None else round(price, 1) for price in (weighed.own, weighed.changed))
    return {"own_price_tokens": own, "changed_price_tokens": changed, "changed": weighed.taken}


def _change(change: ShownChange) -> Document:
    return {
        "rule": change.rule.value if change.rule else None,
        "mode": change.mode.value,
        "declined": change.declined,
        "path": change.path,
        "before": change.before,
        "after": change.after,
    }


def _acts(record: Record) -> Document:
    """Return what was done because of the shared KV buffer and of priorities, as fields of a document."""
    return {
        "pool": [{"act": each.act.value, "slot": each.slot, "cells": each.cells} for each in record.pooled],
        "priority_acts": [
            {
                "act": each.act.value,
                "other": id_of(each.other) if each.other else None,
                "waited_seconds": round(each.waited, 3),
                "gain_seconds": None if each.gain is None else round(each.gain, 3),
                "loss_seconds": None if each.loss is None else round(each.loss, 3),
            }
            for each in record.ranked
        ],
    }


# -- routes ----------------------------------------------------------------------------------------------

LIMIT: Final = 50
MOST: Final = 500
NEWEST: Final = "last"

log = get_logger(__name__)


class RequestRoutes:
    """`/api/requests` and `/api/requests/{id}`."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/api/requests", self._list),
            web.get("/api/requests/{id}", self._one),
        ]

    async def _list(self, request: web.Request) -> web.Response:
        """List requests, the newest first, filtered by `limit`, `conversation` and `repeated=1`."""
        most, conversation = min(MOST, number(request, "limit", LIMIT)), number(request, "conversation", -1)
        found = (
            record
            for record in self._driver.journal
            if conversation in (-1, record.goes_on)
            and (request.query.get("repeated") != "1" or record.repeated > FEW)
        )
        now = partial(self._now, places=places_in(self._driver))
        return answer({"requests": [now(record) | summary(record) for record in islice(found, most)]})

    async def _one(self, request: web.Request) -> web.Response:
        wanted = request.match_info["id"]
        record = self._find(wanted)
        if record is None:
            kept = len(self._driver.journal)
            among = f"none of the last {kept} requests" if kept else "no request is kept, so none"
            raise refused(web.HTTPNotFound, f"{among} has the id {wanted}")
        places, took = places_in(self._driver), self._driver.journal.took_slot(record)
        document = self._now(record, places) | detail(record, took)
        if record.divergence and record.divergence.now:
            document["parting"]["text"] = await self._text(record, record.divergence)
        return answer(document)

    def _now(self, record: Record, places: dict[RequestId, int]) -> Document:
        moment = moment_of(self._driver, record, places)
        return {"now": moment and moment.shown(), **time_of(record, self._driver.now())}

    def _find(self, wanted: str) -> Record | None:
        if wanted == NEWEST:
            return next(iter(self._driver.journal), None)
        return self._driver.journal.find(wanted)

    async def _text(self, record: Record, divergence: PromptDivergence) -> dict[str, str] | None:
        """Return the text around the divergence, detokenized by the engine; None if it does not answer."""
        link = next((link for link in self._driver.links.values() if link.engine == record.engine), None)
        if link is None:
            return None
        pieces = (
            divergence.now[: divergence.lead],
            divergence.was[divergence.lead :],
            divergence.now[divergence.lead :],
        )
        texts = [[token for token in piece if token >= 0] for piece in pieces]  # images have no words
        try:
            lead, was, now = [await link.client.detokenize(ids, headers=link.auth) for ids in texts]
        except (EngineError, EngineGoneError) as error:
            log.debug("not_detokenized", request_id=record.request_id, error=type(error).__name__)
            return None
        return {"lead": masked(lead), "was": masked(was), "now": masked(now)}
