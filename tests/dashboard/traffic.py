"""What clients ask while somebody looks at the dashboard."""

from __future__ import annotations

from typing import Any, Final

import httpx

from patience import PATIENCE
from slotkeeper.bench.sessions import PLAIN, prose

HOSTILE: Final = "<img src=x onerror=document.title='owned'>"
BEFORE, BEHIND = prose(1500, 31), prose(1500, 32)


def clocked(minute: int) -> str:
    """A system prompt with a clock in it, and markup that must stay text."""
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
    """One turn of a conversation. Returns the history with it."""
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
    """A conversation of the client's own name."""
    history: tuple[dict[str, Any], ...] = ()
    for turn in range(turns):
        question = f"{name}, {turn}. {prose(400, 50 + turn)}"
        headers = {"X-Slotkeeper-Conversation": name}
        history = await ask(base, question, history=history, headers=headers, **how)


async def talk_with_a_clock(base: str, turns: int) -> None:
    """It begins with the time, so all behind that is computed again at each turn."""
    history: tuple[dict[str, Any], ...] = ()
    for turn in range(turns):
        history = await ask(base, f"And now? {turn}", system=clocked(turn), history=history)
