"""Send a request to a server; return the parts of its answer that must be equal on both servers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from chaos.raw import dial
from contract.cases import Case
from slotkeeper.api.head import HOP_BY_HOP

CLOCKS: Final = ("date", "process-start-time-unix")
OURS: Final = ("x-request-id", "x-slotkeeper-")
# Random values, times and places: ids, clocks, durations, the slot.
MASKS: Final = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (rb'"(id|item_id|call_id|tool_call_id)":\s?"[^"]*"', rb'"\1":"*"'),
        (rb'"(created|created_at|completed_at|id_slot|id_task|id|t_last_used)":\s?-?\d+', rb'"\1":*'),
        (rb'"timings":\s?\{[^}]*\}', rb'"timings":*'),
        (rb'"(\w+_ms|time_ms|media_marker|system_fingerprint)":\s?("[^"]*"|[-.\de]+)', rb'"\1":*'),
        (rb"(?m)^(llamacpp:\w+) .*$", rb"\1 *"),
        (rb"/\S*/(slots?)/", rb"\1/"),
    )
)


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: list[tuple[str, str]]
    body: bytes


async def ask(address: str, case: Case) -> Reply:
    """Send a request; return the parts of the answer that do not depend on chance."""
    body = case.body
    lines = {"Host": "same.example", "Connection": "close", **case.headers}
    if body is not None or case.method == "POST":
        lines["Content-Length"] = str(len(body or b""))
    head_lines = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    async with dial(address) as wire:
        await wire.send(f"{case.method} {case.path} HTTP/1.1\r\n{head_lines}\r\n".encode() + (body or b""))
        head = await wire.head()
        data = b"" if case.method == "HEAD" or head.status == 204 else await wire.body(head)
    masked = data
    for pattern, replacement in MASKS:
        masked = pattern.sub(replacement, masked)
    kept = [
        (name.lower(), value)
        for name, value in head.headers
        if name.lower() not in HOP_BY_HOP
        and name.lower() not in CLOCKS
        and not name.lower().startswith(OURS)
        and not (name.lower() == "content-length" and masked != data)  # masked parts have any length
    ]
    return Reply(head.status, sorted(kept), masked)
