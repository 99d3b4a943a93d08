"""The pod of the manifests as real processes: an engine, `slotkeeper serve`, their probes, and their end."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.kubelet import Pod, running
from deploy.manifests import rendered
from engine.conftest import wait_until
from patience import PATIENCE
from programs import program
from slotkeeper.bench.texts import prose

CHAT = "/v1/chat/completions"
PLAIN = {"temperature": 0, "chat_template_kwargs": {"plain": True}}
ANSWER_TOKENS = 3000  # takes seconds: it must not be complete when the pod is deleted

Message = dict[str, str]


def question(number: int, text: str) -> Message:
    return {"role": "user", "content": f"Question {number}. {text}"}


@contextmanager
def streamed(pod: Pod, messages: list[Message]) -> Iterator[Iterator[str]]:
    """Yield the lines of a long answer."""
    body = {"messages": messages, "stream": True, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, **PLAIN}
    with httpx.stream("POST", f"{pod.url('data')}{CHAT}", json=body, timeout=PATIENCE) as answer:
        assert answer.status_code == 200
        yield (line for line in answer.iter_lines() if line.startswith("data: "))


def text_in(lines: list[str]) -> str:
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if not line.endswith("[DONE]")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def reply(pod: Pod, messages: list[Message]) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 8, **PLAIN}
    return httpx.post(f"{pod.url('data')}{CHAT}", json=body, timeout=PATIENCE).raise_for_status().json()


def at_work(pod: Pod) -> int:
    (engine,) = pod.admin("/api/state").raise_for_status().json()["engines"]
    return sum(slot["state"] != "idle" for slot in engine["slots"])


@pytest.fixture(autouse=True)
def curl() -> str:
    """The engine's probes run it."""
    return program("curl")


def test_a_deleted_pod_finishes_its_answer_and_the_next_pod_restores_its_state(build: str, tmp_path: Path):
    manifests = rendered("overlays/cpu")
    messages = [question(1, prose(4000, 1))]
    with running(manifests, build, tmp_path, "old") as pod:
        assert httpx.get(f"{pod.url('admin')}/metrics", timeout=PATIENCE).status_code == 401
        assert "slotkeeper_" in pod.admin("/metrics").raise_for_status().text
        with streamed(pod, messages) as lines:
            first = next(lines)
            pod.engine.tell(signal.SIGSTOP)  # so that its answer surely goes on
            try:
                deadline = pod.told_to_end()
                wait_until(lambda: not pod.passes("readinessProbe"))
                assert pod.passes("livenessProbe")
                assert at_work(pod), "the stream is still running"
            finally:
                pod.engine.tell(signal.SIGCONT)
            assert reply(pod, [question(9, "Who comes late?")])["choices"], "not every node knows yet"
            said = [first, *lines]
        assert said[-1] == "data: [DONE]"
        assert pod.ended(deadline) == (0, 0)
        assert time.monotonic() < deadline
        assert not list(pod.hot.glob("*.slot")), "that volume goes with the pod"
        assert [*pod.cold.glob("*.slot"), *pod.cold.glob("*.runs")], "its states are in the other one"

    messages += [{"role": "assistant", "content": text_in(said)}, question(2, "What now?")]
    with running(manifests, build, tmp_path, "new") as pod:
        timings = reply(pod, messages)["timings"]
        assert timings["cache_n"] > 10 * timings["prompt_n"], "the new pod restored the conversation's state"
