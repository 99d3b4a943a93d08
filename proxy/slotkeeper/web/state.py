"""What the admin port shows of the moment: engines, slots, figures, tiers, the prompt tree."""

from __future__ import annotations

import asyncio
import time
from itertools import islice
from typing import Any, Final

from aiohttp import web

from slotkeeper import __version__
from slotkeeper.address import Address
from slotkeeper.observe.history import History
from slotkeeper.observe.why.record import Record
from slotkeeper.observe.why.shown import asked_by
from slotkeeper.runtime.driver import Driver
from slotkeeper.runtime.link import EngineLink
from slotkeeper.scheduler.limits import Limits
from slotkeeper.scheduler.slot_contents import SlotContents
from slotkeeper.scheduler.snapshots import Tier
from slotkeeper.scheduler.table import EngineTable
from slotkeeper.scheduler.traits import Memory, Told
from slotkeeper.web.documents import answer, number
from slotkeeper.web.moments import moment_of

NOTHING_KNOWN: Final[dict[str, Any]] = {
    "memory": Memory.UNKNOWN.value,
    "context_tokens": 0,
    "checkpoint_limit": 0,
    "flags": [],
    "prefill_tokens_per_second": None,
    "slots": [],
    "ram_cache_entries_tokens": [],
}
TWIGS: Final = 200
MOST_TWIGS: Final = 2000
FILES: Final = 200  # snapshots that are looked for in the tree

Document = dict[str, Any]
Latest = dict[tuple[str | None, int | None], Record]  # by engine and slot


def flag(told: Told) -> Document:
    """One of an engine's flags, and how it is known."""
    return {"flag": told.flag, "value": told.value, "how": told.how.value}


class StateRoutes:
    def __init__(self, driver: Driver, history: History, limits: Limits, *, why_text: bool) -> None:
        self._driver = driver
        self._history = history
        self._budgets = {Tier.HOT: limits.hot_bytes, Tier.COLD: limits.cold_bytes}
        self._why_text = why_text
        self._began = time.monotonic()
        self.draining = False
        self.data_port: Address | None = None  # once it listens
        self.scheme = "http"  # of its URL

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/api/state", self._state), web.get("/api/tree", self._tree)]

    async def _state(self, _: web.Request) -> web.Response:
        placement, now = self._driver.placement, self._driver.now()
        latest = self._last_in_slots()
        return answer(
            {
                "version": __version__,
                "draining": self.draining,
                "uptime_seconds": round(time.monotonic() - self._began, 1),
                "tasks": len(asyncio.all_tasks()),
                "queued": placement.queued,
                "data_port": self._data_port(),
                "running": self._running(),
                "clients": [client.shown(now) for client in self._driver.journal.clients],
                "why_text": self._why_text,
                "totals": self._history.totals.shown(),
                "history": list(self._history.shown()),
                "tiers": self._tiers(),
                "engines": [
                    self._engine(link, placement.tables.get(link.engine), latest, now)
                    for link in self._driver.links.values()
                ],
            }
        )

    def _data_port(self) -> Document | None:
        """Where to point a client at; `everywhere`: also at any other address of this machine."""
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
        """Of each slot the newest request that ran there, as far as the journal goes back."""
        return {(record.engine, record.slot): record for record in reversed(tuple(self._driver.journal))}

    def _tiers(self) -> list[Document]:
        if self._driver.snapshots is None:
            return []
        catalog = self._driver.placement.catalog
        return [
            {
                "tier": tier.value,
                "snapshots": sum(snapshot.tier is tier for snapshot in catalog),
                "bytes": catalog.size(tier),
                "budget_bytes": budget,
            }
            for tier, budget in self._budgets.items()
        ]

    def _running(self) -> list[Document]:
        """What has not ended: those that wait in the order of the queue, then the newest first."""
        found = [
            {
                **asked_by(record),
                "engine": record.engine,
                "slot": record.slot,
                "seconds": round(self._driver.now() - record.at, 1),
                "now": moment.shown(),
            }
            for record in self._driver.journal.running()
            if (moment := moment_of(self._driver, record))
        ]
        return sorted(found, key=lambda one: (one["now"]["place"] is None, one["now"]["place"] or 0))

    def _engine(self, link: EngineLink, table: EngineTable | None, latest: Latest, now: float) -> Document:
        """Also one that was never there: then there is nothing more to say of it."""
        known: Document = {
            "engine": link.engine,
            "up": bool(table and table.up),
            "health": link.health.value,
            "down_seconds": None if link.down_since is None else round(max(0.0, now - link.down_since), 1),
            "build": link.build,
        }
        if table is None:
            return known | NOTHING_KNOWN
        rates = table.rates
        return known | {
            "memory": table.traits.memory.value,
            "context_tokens": table.traits.n_ctx,
            "checkpoint_limit": table.traits.checkpoint_cap,
            "flags": [flag(told) for told in table.traits.told()],
            "prefill_tokens_per_second": round(rates.prefill, 1) if "prefill" in rates.measured else None,
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
        covered = self._driver.placement.catalog.covers(contents, table.traits) if contents else 0
        return {
            "held_tokens": contents.total if contents else 0,
            "checkpoints": [checkpoint.at for checkpoint in contents.checkpoints] if contents else [],
            "request": last.request_id if contents and last else None,
            "conversation": last.conversation if contents and last else None,
            "name": str(last.name) if contents and last else None,
            "about": (last.name.words or None) if contents and last else None,
            "idle_seconds": round(max(0.0, now - contents.used), 1) if contents else None,
            "saved": bool(contents and covered * 2 > contents.total),
        }

    async def _tree(self, request: web.Request) -> web.Response:
        placement, now = self._driver.placement, self._driver.now()
        tree = placement.tree
        twigs = tree.hash_chain(min(MOST_TWIGS, number(request, "limit", TWIGS)))
        slots: dict[int | None, list[Document]] = {}
        for table in placement.tables.values():
            for slot, contents in enumerate(table.shadow.slots):
                if contents:
                    slots.setdefault(tree.twig(contents.tokens), []).append(
                        {"engine": table.engine, "slot": slot}
                    )
        files: dict[int | None, int] = {}
        for snapshot in islice(placement.catalog, FILES):
            place = tree.twig(snapshot.tokens)
            files[place] = files.get(place, 0) + 1
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
                        "snapshots": files.get(twig.id, 0),
                    }
                    for twig in twigs
                ],
            }
        )
