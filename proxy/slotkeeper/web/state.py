"""What the admin port shows of the moment: engines, slots, figures, tiers, the prompt tree."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any, Final

from aiohttp import web

from slotkeeper import __version__
from slotkeeper.core.held import Held
from slotkeeper.core.limits import Limits
from slotkeeper.core.snapshots import Tier
from slotkeeper.core.table import EngineTable
from slotkeeper.core.traits import Memory, Told
from slotkeeper.observe.history import History
from slotkeeper.observe.why.record import Record
from slotkeeper.runtime.driver import Driver
from slotkeeper.runtime.link import EngineLink
from slotkeeper.web.documents import answer, number

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
                "queued": placement.queued,
                "why_text": self._why_text,
                "totals": self._history.totals.shown(),
                "history": list(self._history.shown()),
                "tiers": self._tiers(),
                "engines": [
                    *(self._engine(table, latest, now) for table in placement.tables.values()),
                    *(
                        _unseen(link)
                        for link in self._driver.links.values()
                        if link.engine not in placement.tables
                    ),
                ],
            }
        )

    def _last_in_slots(self) -> Latest:
        """Of each slot the newest request that ran there, as far as the journal goes back."""
        return {(record.engine, record.slot): record for record in reversed(tuple(self._driver.journal))}

    def _tiers(self) -> list[Document]:
        if self._driver.snapshots is None:
            return []
        shelf = self._driver.placement.shelf
        return [
            {
                "tier": tier.value,
                "snapshots": sum(snapshot.tier is tier for snapshot in shelf),
                "bytes": shelf.size(tier),
                "budget_bytes": budget,
            }
            for tier, budget in self._budgets.items()
        ]

    def _engine(self, table: EngineTable, latest: Latest, now: float) -> Document:
        rates = table.rates
        return {
            "engine": table.engine,
            "up": table.up,
            "health": self._driver.links[table.engine].health.value,
            "memory": table.traits.memory.value,
            "context_tokens": table.traits.n_ctx,
            "checkpoint_limit": table.traits.checkpoint_cap,
            "flags": [flag(told) for told in table.traits.told()],
            "prefill_tokens_per_second": round(rates.prefill, 1) if "prefill" in rates.measured else None,
            "slots": [
                {
                    "slot": slot,
                    "state": state.value,
                    **self._held(table, held, latest.get((table.engine, slot)), now),
                }
                for slot, (state, held) in enumerate(zip(table.states, table.shadow.slots, strict=True))
            ],
            "ram_cache_entries_tokens": [entry.total for entry in table.shadow.ram],
        }

    def _held(self, table: EngineTable, held: Held | None, last: Record | None, now: float) -> Document:
        covered = self._driver.placement.shelf.covers(held, table.traits) if held else 0
        return {
            "held_tokens": held.total if held else 0,
            "checkpoints": [checkpoint.at for checkpoint in held.checkpoints] if held else [],
            "request": last.request_id if held and last else None,
            "conversation": last.conversation if held and last else None,
            "idle_seconds": round(max(0.0, now - held.used), 1) if held else None,
            "saved": bool(held and covered * 2 > held.total),
        }

    async def _tree(self, request: web.Request) -> web.Response:
        placement, now = self._driver.placement, self._driver.now()
        tree = placement.tree
        twigs = tree.outline(min(MOST_TWIGS, number(request, "limit", TWIGS)))
        slots: dict[int | None, list[Document]] = {}
        for table in placement.tables.values():
            for slot, held in enumerate(table.shadow.slots):
                if held:
                    slots.setdefault(tree.twig(held.tokens), []).append(
                        {"engine": table.engine, "slot": slot}
                    )
        files: dict[int | None, int] = {}
        for snapshot in islice(placement.shelf, FILES):
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


def _unseen(link: EngineLink) -> Document:
    """An engine that has not been up yet: nothing is known of it but why."""
    return {
        "engine": link.engine,
        "up": False,
        "health": link.health.value,
        "memory": Memory.UNKNOWN.value,
        "context_tokens": 0,
        "checkpoint_limit": 0,
        "flags": [],
        "prefill_tokens_per_second": None,
        "slots": [],
        "ram_cache_entries_tokens": [],
    }
