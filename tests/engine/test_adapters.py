"""Adapters on a real engine: it reuses states of other sets; through the sidecar it never does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from adapters import tiny_adapter
from compatibility import Feature
from engine.conftest import SAME_IN_ANY_BATCH, Engine, Factory, client_of, probed
from patience import PATIENCE
from slotkeeper.app import Sidecar
from slotkeeper.bench.models import Tiny
from slotkeeper.scheduler.slots import table
from slotkeeper.settings import Settings

pytestmark = pytest.mark.one_in(8)

MODELS: Final = ["tiny-dense", "tiny-hybrid"]
FIRST: Final = [{"id": 0, "scale": 1.0}]
SECOND: Final = [{"id": 1, "scale": 1.0}]
NONE: Final = [{"id": 0, "scale": 0.0}]
SKY: Final = "The heron stood in the reeds and counted the frogs of the pond, {} by {}. "
ONE_SLOT: Final = ["-np", "1"]
STALE: Final = 0.2  # seconds until the engine is asked for its adapters again
RAM: Final = {"no-ram-cache": ["--cache-ram", "0"], "ram-cache": []}

Start = Callable[..., Engine]


@pytest.fixture
def start(engine_factory: Factory, build: str, tmp_path: Path) -> Start:
    """Start engines with two adapters of scale 0, which only requests that name them use."""

    def begin(model: str, *args: str, applied: str = "0") -> Engine:
        files = ",".join(f"{tiny_adapter(Tiny(model), tmp_path, seed)}:{applied}" for seed in (1, 2))
        return engine_factory(model, build, args=["--lora-scaled", files, *SAME_IN_ANY_BATCH, *args])

    return begin


def story(about: str, sentences: int = 20) -> str:
    return "".join(SKY.format(about, n) for n in range(sentences))


async def ask(
    at: httpx.AsyncClient, prompt: str, lora: Sequence[dict[str, Any]] | None = None, **more: Any
) -> httpx.Response:
    body = {"prompt": prompt, "n_predict": 8, "temperature": 0, **more} | ({"lora": lora} if lora else {})
    answer = await at.post("/completion", json=body)
    assert answer.status_code == 200, answer.text
    return answer


def figures(answer: httpx.Response) -> tuple[int, str]:
    """Return the tokens that were reused, and the text of the answer."""
    body = answer.json()
    return body["timings"]["cache_n"], body["content"]


def direct(engine: Engine) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=engine.base, timeout=PATIENCE)


def settings(engine: Engine, **more: Any) -> Settings:
    at: dict[str, Any] = {"upstream": [engine.base], "listen": "127.0.0.1:0", "admin_listen": "127.0.0.1:0"}
    return Settings(**(at | {"slot_dir": engine.slot_dir} | more))


# -- the engine alone (engine.md T12) --------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
async def test_the_engine_continues_from_states_of_other_adapters(start, model):
    """Its answers from such states differ from the answers from an empty slot."""
    engine, prompt = start(model, *ONE_SLOT), story("pond")
    async with direct(engine) as stock:

        async def fresh(lora: Sequence[dict[str, Any]] | None) -> str:
            return figures(await ask(stock, prompt, lora, cache_prompt=False))[1]

        plain, first, second = [await fresh(lora) for lora in (None, FIRST, SECOND)]
        assert len({plain, first, second}) == 3

        assert (
            figures(await ask(stock, prompt, FIRST))[0] == 0
        )  # the request names another adapter: the slot is emptied
        cached, said = figures(await ask(stock, prompt, FIRST))  # the request names the same adapter again
        assert cached > 0
        assert said == first
        cached, said = figures(await ask(stock, prompt))  # the request names no adapter
        assert cached > 0
        assert said != plain

        await stock.post("/lora-adapters", json=FIRST)
        assert (await stock.post("/slots/0?action=erase", json={})).status_code == 200
        assert figures(await ask(stock, prompt)) == (0, first)
        await stock.post("/lora-adapters", json=SECOND)
        cached, said = figures(await ask(stock, prompt))  # the scales were changed
        assert cached > 0
        assert said != second


# -- through the sidecar ---------------------------------------------------------------------------------


Asked = Sequence[tuple[str, list[dict[str, Any]] | None]]


async def alone(start: Start, model: str, asked: Asked) -> list[str]:
    """Return the answers of an engine that computes each request, once, without its cache."""
    said: dict[str, str] = {}
    async with direct(start(model)) as stock:
        for text, lora in asked:
            if repr((text, lora)) not in said:
                said[repr((text, lora))] = figures(await ask(stock, text, lora, cache_prompt=False))[1]
    return [said[repr(one)] for one in asked]


@pytest.mark.shows(Feature.ADAPTERS)
@pytest.mark.parametrize("flags", RAM.values(), ids=RAM)
@pytest.mark.parametrize("model", MODELS)
async def test_alternating_requests_under_two_adapters_never_share_states(start, model, flags):
    """Two conversations have the same words, each under a different adapter; they take ten turns."""
    asked, said, computed, least = [], [], 0, 0
    texts, known = {0: "", 1: ""}, {0: 0, 1: 0}
    async with probed(settings(start(model, *flags))) as sidecar, client_of(sidecar) as at:
        for turn in range(10):
            which = turn % 2
            texts[which] += story(f"turn {turn // 2}", 12)
            asked.append((texts[which], (FIRST, SECOND)[which]))
            answer = await ask(at, *asked[-1])
            timings = answer.json()["timings"]
            said.append(answer.json()["content"])
            prompt = timings["cache_n"] + timings["prompt_n"]
            computed += timings["prompt_n"] + int(answer.headers["x-slotkeeper-planted"])
            least += prompt - known[which]
            known[which] = prompt
    assert said == await alone(start, model, asked)
    assert computed <= 1.02 * least, (computed, least)


@pytest.mark.parametrize("flags", RAM.values(), ids=RAM)
@pytest.mark.parametrize("files", [True, False], ids=["files", "no-files"])
@pytest.mark.parametrize("model", MODELS)
async def test_a_request_without_adapters_never_reuses_states_of_adapters(start, model, flags, files):
    """All requests use one slot, in which the engine alone would continue from the request before."""
    text = story("same")
    asked = [(text, lora) for lora in (FIRST, None, SECOND, None, FIRST, NONE, None)]
    expected = await alone(start, model, asked)
    engine = start(model, *ONE_SLOT, *flags)
    more = {} if files else {"slot_dir": None}
    async with probed(settings(engine, **more)) as sidecar, client_of(sidecar) as at:
        said = [(await ask(at, prompt, lora)).json()["content"] for prompt, lora in asked]
    assert said == expected


ROUTES: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": story("chat")}], "max_tokens": 8},
    "/v1/responses": {"input": story("chat"), "max_output_tokens": 8},
    "/v1/messages": {"messages": [{"role": "user", "content": story("chat")}], "max_tokens": 8},
}


@pytest.mark.parametrize("hints", [{}, {"X-Slotkeeper-Bypass": "1"}], ids=["placed", "bypass"])
@pytest.mark.parametrize("path", ROUTES)
async def test_no_route_reuses_states_of_other_adapters(start, path, hints):
    body = ROUTES[path] | {"temperature": 0}

    def text(answer: httpx.Response) -> str:
        assert answer.status_code == 200, answer.text
        found = answer.json()
        return str(found.get("choices") or found.get("content") or found["output"][0]["content"])

    async with direct(start("tiny-hybrid")) as stock:
        expected = [text(await stock.post(path, json=body | {"cache_prompt": False}))]
    async with probed(settings(start("tiny-hybrid"))) as sidecar, client_of(sidecar) as at:
        for lora in (FIRST, SECOND):
            for _ in range(2):
                await at.post("/v1/chat/completions", json=ROUTES["/v1/chat/completions"] | {"lora": lora})
        said = [text(await at.post(path, json=body, headers=hints))]
    assert said == expected


async def shown_files(sidecar: Sidecar) -> set[str]:
    """Return the scales in the manifests of the sidecar's snapshots."""
    async with httpx.AsyncClient(base_url=f"http://{sidecar.addresses[1]}", timeout=PATIENCE) as admin:
        found = (await admin.get("/api/snapshots")).json()["snapshots"]
    return {one["adapters"].partition("*")[2] for one in found}


@pytest.mark.parametrize("model", MODELS)
async def test_a_file_is_restored_only_for_a_request_with_the_files_adapters(start, model, tmp_path):
    """After a restart a request of the file's set uses it, and requests of other sets do not."""
    text = story("kept")
    first = start(model)
    async with probed(settings(first)) as sidecar, client_of(sidecar) as at:
        await ask(at, text, FIRST)
        await sidecar.drain(delay=0.0)
    again = start(model, "--slot-save-path", str(first.slot_dir))
    more = [(f"{text} And then?", lora) for lora in (SECOND, None, FIRST)]
    expected = await alone(start, model, more)
    async with probed(settings(again, slot_dir=first.slot_dir)) as sidecar, client_of(sidecar) as at:
        answers = [await ask(at, prompt, lora) for prompt, lora in more]
        shown = await shown_files(sidecar)
    reused = [max(0, figures(answer)[0] - int(answer.headers["x-slotkeeper-planted"])) for answer in answers]
    assert [answer.json()["content"] for answer in answers] == expected
    assert reused[:2] == [0, 0]
    assert reused[2] > 300
    assert answers[2].headers["x-slotkeeper-decision"] == "snapshot"
    assert "1" in shown  # a slow engine's other slot may be worth a file too


@pytest.mark.parametrize("behind_our_back", [False, True], ids=["through-us", "behind-our-back"])
@pytest.mark.parametrize("model", MODELS)
async def test_answers_follow_scales_that_change_while_the_engine_runs(
    start, model, behind_our_back, monkeypatch
):
    """Each answer is that of the current scales, and the first scales find their states again."""
    monkeypatch.setattr(table, "ADAPTERS_STALE", STALE)
    text, scales = story("scales"), [FIRST, SECOND, FIRST]
    expected = await alone(start, model, [(text, lora) for lora in scales])
    engine = start(model)
    said, reused = [], []
    async with probed(settings(engine)) as sidecar, client_of(sidecar) as at, direct(engine) as stock:
        await ask(at, text)
        for lora in scales:
            changed = await (stock if behind_our_back else at).post("/lora-adapters", json=lora)
            assert changed.status_code == 200, changed.text
            if behind_our_back:  # the next request asks the engine if its last answer is older than this
                await asyncio.sleep(STALE)
            answer = await ask(at, text)
            said.append(answer.json()["content"])
            reused.append(figures(answer)[0] - int(answer.headers["x-slotkeeper-planted"]))
    assert said == expected
    assert max(reused[:2]) <= 0  # a token may have been computed for the file of the state before
    assert behind_our_back or reused[2] > 300
