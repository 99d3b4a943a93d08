"""Sidecars with real engines behind HAProxy and nginx, with the configurations in deploy/fleet."""

from __future__ import annotations

from collections.abc import Sequence

import httpx
import pytest

from engine.conftest import wait_until
from fleet.parts import Pod, Talk, client, haproxy, nginx, one_turn, served_by
from patience import PATIENCE

pytestmark = pytest.mark.one_in(8)

GATEWAYS = {"haproxy": haproxy, "nginx": nginx}
TALKS = 12  # the gateway places by a hash of random ports: with few, one pod may get all


def talks(count: int = TALKS) -> list[Talk]:
    return [Talk(f"talk-{n}", seed=40 * n, system="You are an agent.") for n in range(count)]


@pytest.mark.parametrize("gateway", GATEWAYS)
async def test_a_fleet_keeps_conversations_together_until_one_pod_is_left(gateway, pods, tmp_path):
    """One scenario, since starting a fleet takes long."""
    three = [pods.start(), pods.start(), pods.start()]
    (folder := tmp_path / gateway).mkdir()
    with GATEWAYS[gateway]([pod.data for pod in three], folder) as url:
        async with client() as asking:
            homes = await conversations_stay(asking, url, three)
            await streams_headers_and_errors_pass(asking, url)
            await the_name_in_an_answer_keeps_a_conversation_together(asking, url, three)
            left = homes[0]
            drained, killed = (pod for pod in three if pod is not left)
            await no_client_gets_an_error_during_a_drain(asking, url, drained)
            killed.kill()
            for talk in talks():
                assert await served_by(asking, url, talk, [left]) is left
            assert any(home is not left for home in homes)


async def conversations_stay(asking: httpx.AsyncClient, url: str, pods: Sequence[Pod]) -> list[Pod]:
    everyone = talks()
    homes = [await served_by(asking, url, talk, pods) for talk in everyone]
    assert [await served_by(asking, url, talk, pods) for talk in everyone] == homes
    return homes


async def streams_headers_and_errors_pass(asking: httpx.AsyncClient, url: str) -> None:
    (talk,) = talks(1)
    talk.question()
    body = talk.body(stream=True, max_tokens=4)
    headers = {**talk.headers(), "X-Request-Id": "fleet-stream-1"}
    async with asking.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        assert answer.headers["X-Request-Id"] == "fleet-stream-1"
        assert answer.headers["X-Slotkeeper-Conversation"]
        assert "data: [DONE]" in [line async for line in answer.aiter_lines()]
    refused = await asking.post(f"{url}/v1/chat/completions", content=b"{", headers=talk.headers())
    assert refused.status_code == 400
    assert "X-Slotkeeper-Conversation" not in refused.headers
    assert (await asking.get(f"{url}/v1/models")).json()["data"]


async def the_name_in_an_answer_keeps_a_conversation_together(
    asking: httpx.AsyncClient, url: str, pods: Sequence[Pod]
) -> None:
    """A client without a session name sends back the name that the answer gave it."""
    (talk,) = talks(1)
    talk.question()
    first = await asking.post(f"{url}/v1/chat/completions", json=talk.body())
    name = first.headers["X-Slotkeeper-Conversation"]
    talk.heard(first)
    told = {"X-Slotkeeper-Conversation": name}
    homes = [await served_by(asking, url, talk, pods, **told) for _ in range(3)]
    assert homes == homes[:1] * 3


async def no_client_gets_an_error_during_a_drain(asking: httpx.AsyncClient, url: str, drained: Pod) -> None:
    everyone = talks()
    drained.drain()
    while drained.process.poll() is None:
        for talk in everyone:
            answer = await one_turn(asking, url, talk)
            assert answer.status_code == 200, answer.text
            talk.heard(answer)
    assert drained.process.wait() == 0


async def test_health_on_the_data_port_reports_503_during_a_drain(pods):
    pod = pods.start("--drain-delay", str(PATIENCE))  # it is killed before
    async with client() as asking:

        async def status(url: str) -> int:
            return (await asking.get(url)).status_code

        assert await status(f"http://{pod.data}/health") == 200
        assert (await asking.get(f"http://{pod.data}/v1/models")).json()["data"]
        pod.drain()
        wait_until(lambda: httpx.get(f"http://{pod.data}/health", timeout=PATIENCE).status_code == 503)
        assert await status(f"http://{pod.data}/v1/health") == 503
        assert await status(f"http://{pod.admin}/readyz") == 503
        # A request that is sent to it directly is still served.
        assert (await one_turn(asking, f"http://{pod.data}", talks(1)[0])).status_code == 200
