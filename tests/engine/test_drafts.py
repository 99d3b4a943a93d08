"""Accepted drafts after a restart, compared with a slot that computed all its tokens (engine.md 2.6).

A plain restore brings back none of the draft model's state, and a third of the accepted drafts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import httpx
import pytest

from builds import NEWER, OLDER
from compatibility import Feature
from engine.conftest import client_of
from patience import PATIENCE
from slotkeeper.api.document import Doc
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.target import PLAIN
from slotkeeper.bench.texts import prose

CHATS = 5
TURN = 8000  # characters, about 2,100 tokens
SAID = 200  # tokens to generate with drafts
KEPT = {OLDER: 0.65, NEWER: 0.94}  # share of the accepted drafts of a computed slot
DEARER = {OLDER: 0, NEWER: 4}  # tokens computed beyond the new ones


class Drafts(NamedTuple):
    drafted: int
    accepted: int


async def ask(client: httpx.AsyncClient, messages: list[Doc], said: int, **more: Any) -> Doc:
    body = {"messages": messages, "max_tokens": said, "temperature": 0, **PLAIN, **more}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def reply(answer: Doc) -> Doc:
    return answer["choices"][0]["message"]


def question(seed: int, characters: int) -> Doc:
    return {"role": "user", "content": f"Question {seed}. " + prose(characters, seed)}


def rate(found: list[Drafts]) -> float:
    return sum(one.accepted for one in found) / sum(one.drafted for one in found)


def drafts(answer: Doc) -> Drafts:
    return Drafts(answer["timings"]["draft_n"], answer["timings"]["draft_n_accepted"])


@pytest.mark.shows(Feature.DRAFTS, Tiny.HYBRID_MTP)
async def test_drafts_are_accepted_again_after_a_restart(build, tmp_path):
    asked: list[tuple[list[Doc], Doc]] = []
    async with lab.tiny_engine(Tiny.HYBRID_MTP, build, tmp_path) as engine:
        async with (
            lab.keeping(engine) as sidecar,
            client_of(sidecar) as client,
        ):
            for number in range(10, 10 * (CHATS + 1), 10):
                history: list[Doc] = []
                for turn in range(2):  # an engine without draft states in its files needs an earlier file
                    history.append(question(number + turn, TURN))
                    answer = await ask(client, history, 24)
                    history.append(reply(answer))
                    await lab.rested(sidecar)
                held = answer["usage"]["total_tokens"] - 1  # the last token is sampled, not evaluated
                history.append(question(number + 2, 200))
                await lab.restarted(engine, sidecar)
                await lab.rested(sidecar)  # also until its slots are warm
                ours = await ask(client, history, SAID, ignore_eos=True)
                assert ours["timings"]["cache_n"] >= held - DEARER[build]
                asked.append((history, ours))
        restored, computed = [drafts(ours) for _, ours in asked], []
        async with httpx.AsyncClient(base_url=engine.base, timeout=PATIENCE) as direct:
            for history, ours in asked:
                fresh = await ask(direct, history, SAID, ignore_eos=True, cache_prompt=False)
                assert reply(ours) == reply(fresh)
                computed.append(drafts(fresh))
    share = rate(restored) / rate(computed)
    assert share >= KEPT[build], (restored, computed)
