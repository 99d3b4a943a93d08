"""Requests of clients while the dashboard is open."""

from __future__ import annotations

from typing import Any, Final

import httpx

from patience import PATIENCE
from slotkeeper.bench.target import PLAIN
from slotkeeper.bench.texts import prose

HOSTILE: Final = "<img src=x onerror=document.title='owned'>"
BEFORE, BEHIND = prose(1500, 31), prose(1500, 32)


def clocked(minute: int) -> str:
    """Return a system prompt with a clock in it, and markup that must stay text."""
    return f"{BEFORE}\n\nCurrent time: 2026-01-01 10:{minute:02d}:00\n{HOSTILE}\n\n{BEHIND}"


async def ask(
    base: str,
    question: str,
    *,
    system: str = BEFORE,
    history: tuple[dict[str, Any], ...] = (),
    max_tokens: int = 8,
    headers: dict[str, str] | None = None,
) -> tuple[dict[str, Any], ...]:
    """Send one turn of a conversation. Return the history with it."""
    asked = (*history, {"role": "user", "content": question})
    body = {
        **PLAIN,
        "messages": [{"role": "system", "content": system}, *asked],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        answer = await client.post(f"{base}/v1/chat/completions", json=body, headers=headers)
    answer.raise_for_status()
    return (*asked, answer.json()["choices"][0]["message"])


async def talk(base: str, name: str, turns: int, **how: Any) -> None:
    """Play a conversation with this name."""
    history: tuple[dict[str, Any], ...] = ()
    for turn in range(turns):
        question = f"{name}, {turn}. {prose(400, 50 + turn)}"
        headers = {"X-Slotkeeper-Conversation": name}
        history = await ask(base, question, history=history, headers=headers, **how)


async def talk_with_a_clock(base: str, turns: int) -> None:
    """Play a conversation that begins with the time, so each turn computes all after the clock again."""
    history: tuple[dict[str, Any], ...] = ()
    for turn in range(turns):
        history = await ask(base, f"And now? {turn}", system=clocked(turn), history=history)
