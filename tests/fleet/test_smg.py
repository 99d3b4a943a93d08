"""Sidecars behind SMG, a gateway on PyPI (`make test-fleet`): what it passes on and keeps together."""

from __future__ import annotations

from collections.abc import Sequence

import httpx
import pytest

from fleet.parts import MODEL, Pod, Talk, client, one_turn, served_by, smg

pytestmark = pytest.mark.fleet


def talks(count: int) -> list[Talk]:
    """Return conversations without session names, each with its own prompt: a gateway has only their text."""
    systems = (f"You are agent {n}. Agent {n} works alone. " * 40 for n in range(count))
    return [Talk(f"talk-{n}", seed=40 * n, system=system) for n, system in enumerate(systems)]


async def home_of(asking: httpx.AsyncClient, url: str, talk: Talk, pods: Sequence[Pod]) -> Pod:
    """Send one turn without the name of its session; return the pod that answered it."""
    return await served_by(asking, url, talk, pods, Accept="application/json")


@pytest.mark.parametrize("count", [2, 3])
async def test_cache_aware_routing_keeps_conversations_together_after_a_pod_is_lost(pods, tmp_path, count):
    fleet = [pods.start() for _ in range(count)]
    with smg([pod.data for pod in fleet], tmp_path) as url:
        async with client() as asking:
            everyone = talks(2 * count)
            homes = [await home_of(asking, url, talk, fleet) for talk in everyone]
            for _ in range(2):
                assert [await home_of(asking, url, talk, fleet) for talk in everyone] == homes
            fleet[0].kill()
            for talk in everyone:
                assert await home_of(asking, url, talk, fleet[1:]) in homes


async def test_every_api_and_its_streams_are_forwarded(pods, tmp_path):
    fleet = [pods.start() for _ in range(2)]
    said = [{"role": "user", "content": "Say a word."}]
    asked = {
        "/v1/chat/completions": {"messages": said, "max_tokens": 4},
        "/v1/completions": {"prompt": "Say a word.", "max_tokens": 4},
        "/v1/messages": {"messages": said, "max_tokens": 4},
        "/v1/responses": {"input": "Say a word.", "max_output_tokens": 16},
    }
    with smg([pod.data for pod in fleet], tmp_path) as url:
        async with client() as asking:
            for path, body in asked.items():
                for stream in (False, True):
                    answer = await asking.post(
                        f"{url}{path}", json={"model": MODEL, "stream": stream, **body}
                    )
                    assert answer.status_code == 200, (path, stream, answer.text)
                    for name in ("X-Slotkeeper-Conversation", "X-Slotkeeper-Decision"):
                        assert answer.headers[name], (path, stream)
                    kind = answer.headers["Content-Type"]
                    assert kind.startswith("text/event-stream" if stream else "application/json"), (
                        path,
                        stream,
                    )


async def test_a_draining_pod_gets_no_new_request(pods, tmp_path):
    fleet = [pods.start("--drain-delay", "8") for _ in range(2)]
    drained, left = fleet
    with smg([pod.data for pod in fleet], tmp_path) as url:
        async with client() as asking:
            everyone = talks(4)
            for talk in everyone:
                await home_of(asking, url, talk, fleet)
            drained.drain()
            while drained.process.poll() is None:
                for talk in everyone:
                    answer = await one_turn(asking, url, talk)
                    assert answer.status_code == 200, answer.text
                    talk.heard(answer)
            assert drained.process.wait() == 0
            for talk in everyone:
                assert await home_of(asking, url, talk, [left]) is left
