"""The words that every module shares: ids, places, reasons."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

EngineId = NewType("EngineId", str)  # the upstream's base URL, without a trailing slash
SlotId = NewType("SlotId", int)
RequestId = NewType("RequestId", str)
ClientId = NewType("ClientId", str)  # who waits in line: an API key's digest, else an address


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """One slot of one engine. Every key of the core is a Place."""

    engine: EngineId
    slot: SlotId

    def __str__(self) -> str:
        return f"{self.engine}#{self.slot}"


class Crowded(StrEnum):
    """Why a request may not stand in line."""

    ALL = "all"  # the queue is as long as it may be
    CLIENT = "client"  # so many of this client's wait already
    KEY_QUEUED = "key_queued"  # so many of its key wait already, by the keys file
    KEY_CONCURRENT = "key_concurrent"  # so many of its key run or wait already, by the keys file
    KEY_TOKENS = "key_tokens"  # its key has used its tokens of this minute, by the keys file


class Reason(StrEnum):
    """Why a request was placed where it was: the same in logs, metrics, headers and tests."""

    CONTINUES = "continues"  # the request's messages extend those in the slot; decided without token ids
    PREFIX = "prefix"  # cheapest: this slot holds the longest reusable prefix
    RAM_CACHE = "ram_cache"  # the engine loads the prefix from its own RAM prompt cache
    SNAPSHOT = "snapshot"  # a snapshot was restored, because that is cheaper than any slot as it is
    COLD = "cold"  # no reusable prefix anywhere: the slot that loses least
    CLIENT_CHOSE = "client_chose"  # the request carried id_slot
    ENGINE_CHOSE = "engine_chose"  # left to the engine, because pinning would lose (engine.md T6)
    STEERED = "steered"  # the route ignores id_slot: the prefix was prefilled where the engine will look (T5)
    UNPINNABLE = "unpinnable"  # it takes a slot that cannot be chosen (embeddings, n > 1)
    BRIEF = "brief"  # so short that the slot that loses least is best, whatever it holds
    UNRENDERED = "unrendered"  # the prompt's tokens are unknown: placed by messages or age alone
    BYPASS = "bypass"  # X-Slotkeeper-Bypass: 1
    FAIL_OPEN = "fail_open"  # Slotkeeper failed; the request went through unchanged
