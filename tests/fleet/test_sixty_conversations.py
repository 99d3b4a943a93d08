"""Sixty conversations on three pods, of which one is killed, one is drained, and one is added meanwhile.

Pods share an S3 store and Redis, or nothing. Figures go to artifacts/benchmarks/fleet-GATEWAY-SNAPSHOTS.json.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from benchmarks.figures import keep

from engine.conftest import wait_until
from fleet.parts import Pod, Pods, Talk, client, haproxy, one_turn, smg
from slotkeeper.bench.measure import Oracle
from slotkeeper.bench.texts import prose
from slotkeeper.engine.child.launch import free_port
from slotkeeper.scheduler.prompts.tokens import Tokens

pytestmark = pytest.mark.fleet

TALKS, TURNS, AT_ONCE = 60, 3, 6
SYSTEMS = 3
LEAD = 12_000  # characters at the beginning of each conversation: with these, computing a state takes longer
# than fetching it, on small models too. Shorter ones are rightly computed again.
# With a shared store. Without one there is no limit: conversations of lost pods are computed again.
WAITED = 1.10  # waited ratio, with the oracle of the whole fleet
BEHIND = 0.05  # how far the hit rate may be below that of one engine with three times the slots


@dataclass
class Crowd:
    """All conversations' turns, some at once, in an order that does not depend on time."""

    url: str
    talks: list[Talk]
    computed: int = 0
    prompts: int = 0
    errors: list[str] = field(default_factory=list)
    sent: list[list[dict[str, str]]] = field(default_factory=list)

    async def turn(self, asking: httpx.AsyncClient, talk: Talk) -> None:
        """Send a turn; send it again if it failed, as agents do."""
        for attempt in range(4):
            try:
                answer = await one_turn(asking, self.url, talk)
            except httpx.TransportError as error:
                self.errors.append(repr(error))
            else:
                if answer.is_success:
                    break
                self.errors.append(f"{answer.status_code} {answer.text[:200]}")
            talk.messages.pop()
            await asyncio.sleep(0.5 * (1 + attempt))
        else:
            raise AssertionError(f"{talk.name} was never answered: {self.errors[-4:]}")
        self.sent.append([*talk.messages])
        self.computed += talk.heard(answer)
        self.prompts += int(answer.json()["usage"]["prompt_tokens"])

    async def round(self, asking: httpx.AsyncClient, events: dict[int, Any] | None = None) -> None:
        """Play one turn of each; `events` run after that many turns have begun."""
        gate, begun = asyncio.Semaphore(AT_ONCE), 0

        async def one(talk: Talk) -> None:
            nonlocal begun
            async with gate:
                begun += 1
                if events and begun in events:
                    await asyncio.to_thread(events[begun])
                await self.turn(asking, talk)

        await asyncio.gather(*(one(talk) for talk in self.talks))
        random.Random(len(self.sent)).shuffle(self.talks)

    @property
    def hit_rate(self) -> float:
        return 1 - self.computed / self.prompts

    async def oracle(self, asking: httpx.AsyncClient, engine: str) -> int:
        """Return the tokens of a perfect cache for all requests that were sent."""
        seen, least = Oracle(), 0
        for messages in self.sent:
            body = {"messages": messages, "chat_template_kwargs": {"plain": True}}
            text = (await asking.post(f"{engine}/apply-template", json=body)).json()["prompt"]
            asked = {"content": text, "add_special": True, "parse_special": True}
            tokens = Tokens((await asking.post(f"{engine}/tokenize", json=asked)).json()["tokens"])
            least += seen.least(tokens)
            seen.saw(tokens)
        return least


def talks() -> list[Talk]:
    made = [
        Talk(f"talk-{n}", seed=31 * n, system=f"You are agent {n % SYSTEMS}. " * 60) for n in range(TALKS)
    ]
    for talk in made:
        talk.messages += [
            {"role": "user", "content": prose(LEAD, 10_000 + talk.seed)},
            {"role": "assistant", "content": "I have read it."},
        ]
    return made


def started(pods: Pods, *more: str, slots: int = 2, data: str | None = None) -> Pod:
    return pods.start("--hot-bytes", "4GiB", *more, data=data, slots=slots, files=True)


def address() -> str:
    return f"127.0.0.1:{free_port()}"


async def alone(pods: Pods) -> tuple[float, int]:
    """Return the hit rate and the computed tokens of one engine with three times the slots."""
    pod = started(pods, slots=6)
    crowd = Crowd(f"http://{pod.data}", talks())
    async with client() as asking:
        for _ in range(TURNS):
            await crowd.round(asking)
    assert not crowd.errors
    pod.kill()
    return crowd.hit_rate, crowd.computed


def added(url: str, pod: Pod) -> None:
    """Add a pod: SMG learns of it by its API; HAProxy has checked its health since the start."""
    if httpx.get(f"{url}/workers").is_success:
        assert httpx.post(f"{url}/workers", json={"url": f"http://{pod.data}"}).is_success


GATEWAYS = {"smg": smg, "haproxy": haproxy}


@pytest.mark.parametrize("snapshots", ["shared", "local"])
@pytest.mark.parametrize("gateway", GATEWAYS)
async def test_sixty_conversations_while_pods_are_killed_drained_and_added(
    gateway, snapshots, pods, tmp_path, shared
):
    store = shared if snapshots == "shared" else []
    (folder := tmp_path / gateway).mkdir()
    best, _ = await alone(pods)
    killed, drained, left = (started(pods, *store) for _ in range(3))
    later = address()
    known: Sequence[str] = [pod.data for pod in (killed, drained, left)]
    if gateway == "haproxy":
        known = [*known, later]
    with GATEWAYS[gateway](known, folder) as url:
        crowd = Crowd(url, talks())
        async with client() as asking:
            await crowd.round(asking)
            await crowd.round(
                asking, {20: killed.kill, 40: lambda: added(url, started(pods, *store, data=later))}
            )
            in_flight, crowd.errors = crowd.errors, []
            drained.drain()
            await crowd.round(asking)
            wait_until(lambda: drained.process.poll() is not None)
            assert drained.process.wait() == 0
            least = await crowd.oracle(asking, left.engine.base)
    waited = crowd.computed / least
    figures = {
        "gateway": gateway,
        "snapshots": snapshots,
        "requests": len(crowd.sent),
        "oracle": least,
        "computed": crowd.computed,
        "waited": round(waited, 3),
        "hit_rate": round(crowd.hit_rate, 4),
        "hit_rate_of_one": round(best, 4),
        "errors_of_the_killed": in_flight,
        "other_errors": crowd.errors,
        "served": {pod.data: pod.served() for pod in (left, pods.all[-1])},
    }
    keep(f"fleet-{gateway}-{snapshots}", [figures])
    assert len(crowd.sent) == TALKS * TURNS
    assert len(in_flight) <= AT_ONCE, figures
    assert not crowd.errors, figures
    if store:
        assert waited <= WAITED, figures
        assert crowd.hit_rate >= best - BEHIND, figures
    assert pods.all[-1].served() > 0, "the pod that was added serves"
