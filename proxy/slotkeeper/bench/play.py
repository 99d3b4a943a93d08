"""Playing a scripted session against a server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import orjson

from slotkeeper.api.document import Doc
from slotkeeper.bench.measure import Sample
from slotkeeper.bench.sessions import Script, Turn
from slotkeeper.bench.target import Shot, Target

CHAT: Final = "/v1/chat/completions"
SILENCE: Final[Doc] = {"role": "assistant", "content": "x"}  # so that a script can go on after a failure


async def at_once(_: Turn) -> None:
    """What happens before a turn, where nothing does."""


async def play(
    script: Script,
    target: Target,
    *,
    session: str,
    seen: Callable[[Sample], Any] = lambda _: None,
    sent: Callable[[Shot], Any] = lambda _: None,
    before: Callable[[Turn], Awaitable[None]] = at_once,
) -> list[Sample]:
    """Ask every turn of `script`, one after the other.

    `session` names those that the script does not. `before` is waited for before each turn, `sent` is told
    each request before it goes out, `seen` each sample as it comes.
    """
    samples: list[Sample] = []
    reply: Doc | None = None
    while True:
        try:
            turn = next(script) if reply is None else script.send(reply)
        except StopIteration:
            return samples
        await before(turn)
        # The probabilities carry the ids of the sampled tokens, which the oracle wants. Not to be had in
        # a stream when there are tools (400), so nothing is streamed here.
        body = {**turn.body(), "logprobs": True}
        shot = Shot(session=turn.session or session, label=turn.label, path=CHAT, body=body, headers={})
        sent(shot)
        hit = await target.fire(shot)
        samples.append(hit.sample)
        seen(hit.sample)
        reply = spoken(hit.reply) if hit.reply else SILENCE


def spoken(reply: Doc) -> Doc:
    """The reply as a client sends it back: without tool calls that `max_tokens` cut in two."""
    try:
        for call in reply.get("tool_calls") or ():
            orjson.loads(call["function"]["arguments"])
    except orjson.JSONDecodeError:
        return {key: value for key, value in reply.items() if key != "tool_calls"}
    return reply
