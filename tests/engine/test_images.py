"""Prompts with images on real engines: tokens computed, states never reused, and answers.

A question here is all text that the template puts behind the image. Each answer is compared with the engine's
answer to the same body without the sidecar and without its cache.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from benchmarks.projectors import Projector, data_url, image, png, projector

from compatibility import Feature
from slotkeeper.api.head import DECISION, PREDICTED
from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny

pytestmark = pytest.mark.one_in(8)

PAIRS: Final = {
    "hybrid": (Tiny.HYBRID, Projector.QWEN),
    "swa": (Tiny.SWA, Projector.GEMMA),
    "dense": (Tiny.DENSE, Projector.GEMMA),
}
OTHERS: Final = {"mtp": (Tiny.HYBRID_MTP, Projector.QWEN)}
MORE: Final = 8  # tokens besides the question
AROUND: Final = 16  # tokens around an image, at most; prompts with two images share those before it
SYSTEM: Final = "You look at pictures. " + "Say what is there, and nothing else. " * 60
FIRST: Final = "What Who Where Nothing Some Return When Class None For If In"
QUESTIONS: Final = tuple(f"{word} is to be seen here, and of which colour is it?" for word in FIRST.split())
A, B, C = (png(320, 320, seed) for seed in (1, 2, 3))


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, with its answer and figures from the engine."""

    path: str
    body: dict[str, Any]
    text: str
    cached: int
    prompt: int
    planted: int
    predicted: int | None
    decision: str

    @property
    def computed(self) -> int:
        return self.prompt - self.cached + self.planted


@dataclass(slots=True)
class Viewer:
    """A client that uses one engine through a sidecar."""

    engine: lab.Restartable
    sidecar: Sidecar
    session: aiohttp.ClientSession
    promises: bool = True  # whether a prediction above the tokens reused is an error
    asked: list[Asked] = field(default_factory=list)

    async def send(self, path: str, body: dict[str, Any]) -> Asked:
        before = lab.spent(self.sidecar).plant
        async with self.session.post(path, json=body) as response:
            answer, headers = await response.json(), response.headers
            assert response.status == 200, answer
        cached, prompt = counted(answer)
        predicted = headers.get(PREDICTED)
        one = Asked(
            path=path,
            body=body,
            text=said(answer),
            cached=cached,
            prompt=prompt,
            planted=lab.spent(self.sidecar).plant - before,
            predicted=None if predicted is None else int(predicted),
            decision=headers[DECISION],
        )
        if self.promises:
            assert one.predicted is None or one.predicted <= cached, "more was promised than is reused"
        self.asked.append(one)
        return one

    async def ask(self, *content: Any, before: Sequence[dict[str, Any]] = (), system: str = SYSTEM) -> Asked:
        messages = [{"role": "system", "content": system}, *before, {"role": "user", "content": [*content]}]
        return await self.send(
            "/v1/chat/completions", {"messages": messages, "max_tokens": 6, "temperature": 0}
        )

    async def about(self, picture: bytes, question: str) -> Asked:
        return await self.ask(image(picture), words(question))

    async def texts(self, body: dict[str, Any]) -> list[int]:
        """Return the tokens of each text around the images, rendered with the engine's own template."""
        async with self.session.get("/props") as response:
            marker = (await response.json())["media_marker"]
        async with self.session.post("/apply-template", json=body) as response:
            parts = (await response.json())["prompt"].split(marker)
        found = []
        for part in parts:
            async with self.session.post(
                "/tokenize", json={"content": part, "parse_special": True}
            ) as response:
                found.append(len((await response.json())["tokens"]))
        return found

    async def question(self, question: str) -> int:
        """Return the tokens that a question takes behind an image; they are the same in every API."""
        content = [image(A), words(question)]
        return (await self.texts({"messages": [{"role": "user", "content": content}]}))[-1]

    async def tokens_behind(self, body: dict[str, Any], messages: int) -> int:
        """Return the tokens behind the system message and the first `messages` messages."""
        before = {**body, "messages": body["messages"][: messages + 1], "add_generation_prompt": False}
        return sum(await self.texts(body)) - sum(await self.texts(before))

    async def expect_question(self, asked: Asked) -> None:
        """Assert that the request computed only the text behind its image."""
        assert asked.computed <= (await self.texts(asked.body))[-1] + MORE

    async def expect_same_answers(self) -> None:
        async with aiohttp.ClientSession(self.engine.base) as engine:
            for one in self.asked:
                async with engine.post(one.path, json={**one.body, "cache_prompt": False}) as response:
                    assert said(await response.json()) == one.text


def counted(answer: dict[str, Any]) -> tuple[int, int]:
    """Return the cached tokens and all tokens of the prompt."""
    if timings := answer.get("timings"):
        return timings["cache_n"], timings["cache_n"] + timings["prompt_n"]
    usage = answer["usage"]
    if "input_tokens_details" in usage:
        return usage["input_tokens_details"]["cached_tokens"], usage["input_tokens"]
    cached = usage["cache_read_input_tokens"]  # /v1/messages does not include it in the input
    return cached, cached + usage["input_tokens"]


def said(answer: dict[str, Any]) -> str:
    """Return all texts of an answer of any API."""
    if "choices" in answer:
        message = answer["choices"][0]["message"]
        return f"{message.get('reasoning_content')}|{message['content']}"
    parts = (
        answer["content"]
        if "content" in answer
        else [p for item in answer["output"] for p in item["content"]]
    )
    return "|".join(str(part.get("text", part.get("thinking"))) for part in parts)


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


@asynccontextmanager
async def engine_with(
    pair: str, build: str, folder: Path, *args: str, kind: Projector | None = None, seed: int = 0
) -> AsyncIterator[lab.Restartable]:
    """Run an engine; without `-cms 0` the older build drops checkpoints behind images (engine.md T7)."""
    model, usual = (PAIRS | OTHERS)[pair]
    path = projector(kind or usual, folder, seed)
    async with lab.tiny_engine(model, build, folder, "--mmproj", str(path), "-cms", "0", *args) as engine:
        yield engine


@asynccontextmanager
async def viewing(
    engine: lab.Restartable, *, keeps: bool = False, told: bool = True, **settings: Any
) -> AsyncIterator[Viewer]:
    """Run a sidecar. `keeps`: it has a slot folder; `told`: it knows the engine's flags."""
    folder = {"slot_dir": engine.flags.slot_save_path, "save_pause": lab.PAUSE_SECONDS} if keeps else {}
    begun = lab.in_front_of(engine.base, engine.flags if told else None, **folder, **settings)
    async with begun as sidecar, aiohttp.ClientSession(lab.url_of(sidecar)) as session:
        yield Viewer(engine, sidecar, session)


@pytest.mark.shows(Feature.IMAGES)
@pytest.mark.parametrize("pair", PAIRS)
async def test_each_further_question_about_an_image_computes_only_the_question(build, pair, tmp_path):
    async with engine_with(pair, build, tmp_path) as engine, viewing(engine) as client:
        await client.about(A, QUESTIONS[0])
        for question in QUESTIONS[1:]:
            await client.expect_question(await client.about(A, question))
        await client.expect_same_answers()


@pytest.mark.shows(Feature.IMAGES)
@pytest.mark.parametrize("pair", PAIRS | OTHERS)
async def test_states_of_two_images_are_reused_alternately_and_after_a_kill(build, pair, tmp_path):
    async with engine_with(pair, build, tmp_path) as engine, viewing(engine, keeps=True) as client:
        for picture in (A, B):
            await client.about(picture, QUESTIONS[0])
        for number, question in enumerate(QUESTIONS[1:7]):
            await client.expect_question(await client.about((A, B)[number % 2], question))
        await lab.rested(client.sidecar)
        await lab.restarted(engine, client.sidecar)
        for picture, question in zip((B, A, B), QUESTIONS[7:], strict=False):
            await client.expect_question(await client.about(picture, question))
        await client.expect_same_answers()


@pytest.mark.shows(Feature.SIDECAR)
@pytest.mark.parametrize("also_the_engine", [False, True], ids=["sidecar", "both"])
@pytest.mark.parametrize("pair", PAIRS)
async def test_a_new_sidecar_reuses_saved_states_with_images(build, pair, also_the_engine, tmp_path):
    async with engine_with(pair, build, tmp_path) as engine:
        async with viewing(engine, keeps=True) as client:
            for question in QUESTIONS[:3]:
                await client.about(A, question)
            await lab.rested(client.sidecar)
        if also_the_engine:
            await engine.restart()
        async with viewing(engine, keeps=True) as client:
            await client.expect_question(await client.about(A, QUESTIONS[3]))
            await client.expect_same_answers()


@pytest.mark.parametrize("pair", PAIRS)
async def test_two_conversations_share_the_prefix_with_the_image(build, pair, tmp_path):
    """The shared beginning is computed once, and each conversation continues from its own end."""
    async with engine_with(pair, build, tmp_path) as engine, viewing(engine, keeps=True) as client:
        chats: list[list[dict[str, Any]]] = [[], []]
        for turn, (chat, question) in enumerate(zip(chats * 3, QUESTIONS, strict=False)):
            content = [image(A), words(question)] if turn < len(chats) else [words(question)]
            asked = await client.ask(*content, before=chat)
            before = len(chat)
            chat += [
                {"role": "user", "content": content},
                {"role": "assistant", "content": "It is a picture."},
            ]
            if turn == 1:
                await client.expect_question(asked)
            elif turn > 1:
                said_since = await client.tokens_behind(asked.body, before - 1)
                assert asked.computed <= said_since + MORE
            await lab.rested(client.sidecar)
        await client.expect_same_answers()


async def send_replies_back(client: Viewer) -> None:
    """Play a chat after which the next turn of this client is predicted with confidence."""
    chat = []
    for turn in range(6):
        chat.append({"role": "user", "content": f"Tell me more about the garden, part {turn}."})
        body = {"messages": chat, "max_tokens": 8, "chat_template_kwargs": {"enable_thinking": False}}
        async with client.session.post("/v1/chat/completions", json=body) as response:
            chat.append(
                {"role": "assistant", "content": (await response.json())["choices"][0]["message"]["content"]}
            )
        await lab.rested(client.sidecar)


async def test_the_next_turn_is_prefetched_in_idle_time(build, tmp_path):
    """The template strips reasoning of earlier turns, so that the slot has to go back behind the image."""
    async with engine_with("hybrid", build, tmp_path) as engine, viewing(engine) as client:
        await send_replies_back(client)
        before = lab.spent(client.sidecar).idle
        first = {"role": "user", "content": [image(A), words(QUESTIONS[0])]}
        body = {
            "messages": [{"role": "system", "content": SYSTEM}, first],
            "temperature": 0,
            "max_tokens": 200,
        }
        async with client.session.post("/v1/chat/completions", json=body) as response:
            reply = (await response.json())["choices"][0]["message"]
        assert reply["content"]
        await lab.rested(client.sidecar)
        assert lab.spent(client.sidecar).idle > before
        chat = [first, {"role": "assistant", "content": reply["content"]}]
        asked = await client.ask(words(QUESTIONS[1]), before=chat)
        assert asked.computed <= await client.tokens_behind(asked.body, len(chat)) + MORE
        await client.expect_same_answers()


@pytest.mark.parametrize("pair", PAIRS)
async def test_an_edit_after_the_image_computes_only_the_text_after_it(build, pair, tmp_path):
    text = "The picture was taken in a garden behind the house. " * 20
    async with engine_with(pair, build, tmp_path) as engine, viewing(engine) as client:
        await client.about(A, f"{text}What is there?")
        await client.expect_question(await client.about(A, f"It was an old one. {text}What is there?"))
        await client.expect_same_answers()


@pytest.mark.parametrize("pair", PAIRS)
async def test_another_image_is_never_a_hit(build, pair, tmp_path):
    """Neither a slot nor a file is a hit, not even for the same pixels in another file."""
    same_pixels = A + b"\0"
    async with engine_with(pair, build, tmp_path) as engine, viewing(engine, keeps=True) as client:
        await client.about(A, QUESTIONS[0])
        await client.about(A, QUESTIONS[1])
        await lab.rested(client.sidecar)
        for picture in (B, same_pixels, C):
            asked = await client.about(picture, QUESTIONS[0])
            text = (await client.texts(asked.body))[0]
            assert asked.cached - asked.planted <= text + AROUND
            assert (asked.predicted or 0) - asked.planted <= text + AROUND
            await lab.rested(client.sidecar)
            await lab.restarted(engine, client.sidecar)
        await client.expect_same_answers()


@pytest.mark.parametrize("between", [[words(" ")], []], ids=["apart", "touching"])
async def test_a_second_image_in_a_message_is_never_a_hit_for_another_image(build, between, tmp_path):
    """Adjacent images are not tested with Qwen: older builds read two of one size as frames of one image."""
    pair = "hybrid" if between else "dense"
    async with engine_with(pair, build, tmp_path) as engine, viewing(engine) as client:
        for second in (B, C, A, B):
            await client.ask(image(A), *between, image(second), words(QUESTIONS[0]))
        await client.expect_question(await client.ask(image(A), *between, image(B), words(QUESTIONS[1])))
        await client.expect_same_answers()


@pytest.mark.parametrize("known", [True, False], ids=["its file", "nothing"])
async def test_a_state_with_images_is_not_reused_with_another_projector(build, known, tmp_path):
    """The engine would load such a state and continue from the other projector's embeddings."""
    (tmp_path / "one").mkdir()
    async with engine_with("dense", build, tmp_path / "one") as engine:
        async with viewing(engine, keeps=True, told=known) as client:
            await client.about(A, QUESTIONS[0])
            await lab.rested(client.sidecar)
            assert any(snapshot.tokens.chunks for snapshot in client.sidecar.driver.placement.catalog)
        engine.kill()
        other = projector(Projector.GEMMA, tmp_path, seed=5)
        await engine.start("--mmproj", str(other))
        engine.flags = replace(engine.flags, mmproj=other)
        async with viewing(engine, keeps=True, told=known) as client:
            asked = await client.about(A, QUESTIONS[1])
            assert asked.cached <= (await client.texts(asked.body))[0] + asked.planted
            await client.expect_same_answers()


async def test_an_engine_whose_projector_puts_no_text_after_images_does_not_abort(build, tmp_path):
    """This engine aborts on a prompt that ends in an image, so no prompt of the sidecar ends in one.

    The engine leaves no checkpoint right behind an image. The sidecar cannot know this, so the engine reuses
    less than predicted.
    """
    async with (
        engine_with("hybrid", build, tmp_path, kind=Projector.LLAVA) as engine,
        viewing(engine, keeps=True) as client,
    ):
        client.promises = False
        for question in QUESTIONS[:4]:
            await client.about(A, question)
            await client.ask(words(question), image(A))
            await lab.rested(client.sidecar)
        await client.expect_same_answers()
        assert engine.process.returncode is None


def of_responses(question: str) -> dict[str, Any]:
    parts = [{"type": "input_image", "image_url": data_url(A)}, {"type": "input_text", "text": question}]
    said = [{"role": "user", "content": parts}]
    return {"instructions": SYSTEM, "input": said, "temperature": 0, "max_output_tokens": 6}


def of_messages(question: str) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": data_url(A).partition(",")[2]}
    said = [{"role": "user", "content": [{"type": "image", "source": source}, words(question)]}]
    return {"system": SYSTEM, "messages": said, "temperature": 0, "max_tokens": 6}


@pytest.mark.parametrize(("path", "body"), [("/v1/responses", of_responses), ("/v1/messages", of_messages)])
async def test_images_in_other_apis_are_reused(build, path, body, tmp_path):
    async with engine_with("hybrid", build, tmp_path) as engine, viewing(engine) as client:
        for number, question in enumerate(QUESTIONS[:4]):
            asked = await client.send(path, body(question))
            if number:
                assert asked.computed <= await client.question(question) + MORE
            await lab.rested(client.sidecar)  # GET /slots must show first what an unpinned task left
        await client.expect_same_answers()


async def test_an_image_by_file_url_is_forwarded_to_the_engine(build, tmp_path):
    """The engine fetches the image or refuses it, and the client gets the engine's answer."""
    async with engine_with("dense", build, tmp_path) as engine, viewing(engine) as client:
        content = [{"type": "image_url", "image_url": {"url": "file:///nowhere.png"}}, words(QUESTIONS[0])]
        body = {"messages": [{"role": "user", "content": content}]}
        async with client.session.post("/v1/chat/completions", json=body) as response:
            ours = response.status, (await response.json())["error"]["message"]
        async with aiohttp.ClientSession(engine.base) as direct:
            async with direct.post("/v1/chat/completions", json=body) as response:
                assert ours == (response.status, (await response.json())["error"]["message"])
