"""Every view of one session shows the same figures, and their sums are the engine's counters."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import pytest
from benchmarks.rewriters import REWRITERS
from benchmarks.sessions import user
from rich.console import Console

from chaos.raw import until
from slotkeeper.app import Sidecar, running
from slotkeeper.bench import lab
from slotkeeper.bench.measure import Sample, Totals, totals
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.target import CHAT, Counter, Script, Shot, Target, Turn, play
from slotkeeper.bench.texts import prose, system, title
from slotkeeper.cli.terminal import tokens
from slotkeeper.cli.top import top
from slotkeeper.conversation.rules.base import RuleName
from slotkeeper.observe.metrics import Metrics
from slotkeeper.scheduler.requests.figures import Unknown

pytestmark = pytest.mark.one_in(8)

CONTEXT: Final = 16384
NEW: Final = 6  # prompts
Document = dict[str, Any]


def sums_in(state: Document) -> Document:
    """Return the totals and waits of /api/state."""
    sums: Document = state["totals"] | state["waits"]
    return sums


@dataclass(frozen=True, kw_only=True)
class Views:
    """The figures of one session in each view."""

    state: Document  # totals and waits of /api/state
    metrics: Document  # the same, by the names of metrics
    why: list[Document]
    top: str
    replay: Totals
    engine: int  # by the engine's counter, since before the sidecar started

    def sum_in_why(self, name: str) -> int:
        """Return the sums over the requests that `why` lists."""
        return sum(one[name] or 0 for one in self.why)


@dataclass(kw_only=True)
class Session:
    """One engine, a sidecar without its flags, and what a replay measures of the requests."""

    engine: lab.Restartable
    sidecar: Sidecar
    target: Target
    counter: Counter  # since before the sidecar started
    samples: list[Sample] = field(default_factory=list)

    async def play(self, script: Script, name: str, *, pauses: bool = True) -> None:
        async def rest(_: Turn) -> None:
            if pauses:
                await lab.rested(self.sidecar)

        found = await play(script, self.target, session=name, before=rest)
        assert [sample.failure for sample in found if sample.failure] == []
        self.samples += found

    async def restart(self) -> None:
        """Kill the engine, after its counter was read, and restart it."""
        await lab.rested(self.sidecar)
        await self.counter.read()
        await self.target.counter.read()
        await lab.restarted(self.engine, self.sidecar)
        await self.counter.read()  # while it is lower than before, which shows the restart
        await self.target.counter.read()

    async def leave(self, body: Document) -> None:
        """Send a request of a client that disconnects during the answer."""
        async with (
            aiohttp.ClientSession(self.target.base) as client,
            client.post(CHAT, json=body | {"stream": True, "max_tokens": 8000, "ignore_eos": True}) as answer,
        ):
            await answer.content.readany()
        await lab.rested(self.sidecar)

    async def views(self, capsys: pytest.CaptureFixture[str]) -> Views:
        await lab.rested(self.sidecar)
        admin, out = f"http://{self.sidecar.addresses[1]}", io.StringIO()
        console = Console(file=out, width=200)
        assert await top(console, admin=admin, token=None, every=1.0, once=True) == 0
        async with aiohttp.ClientSession(admin) as client:
            async with client.get("/api/state") as answer:
                state = sums_in(await answer.json())
            async with client.get("/api/requests?limit=500") as answer:
                why = (await answer.json())["requests"]
        engine = await self.counter.read()
        assert engine is not None
        return Views(
            state=state,
            metrics=counted(self.sidecar.driver.metrics),
            why=why,
            top=out.getvalue(),
            replay=totals(self.samples),
            engine=engine,
        )


def counted(metrics: Metrics) -> Document:
    """Return the sums by name."""

    def value(name: str, **labels: str) -> float:
        return metrics.registry.get_sample_value(f"slotkeeper_{name}_total", labels) or 0.0

    return {
        "reused": value("prompt_tokens", source="cached"),
        "computed": value("prompt_tokens", source="computed"),
        "prepared": value("prepared_tokens"),
        "oracle": value("oracle_tokens"),
        **{
            purpose: value("prefill_tokens", purpose=purpose)
            for purpose in ("client", "plant", "idle", "probe")
        },
    }


@asynccontextmanager
async def session(model: Tiny, build: str, folder: Any, **settings: Any) -> AsyncIterator[Session]:
    async with (
        lab.tiny_engine(model, build, folder, context_tokens=CONTEXT, recipe=lab.up_flags) as engine,
        Counter([engine.base]) as counter,
    ):
        await counter.read()
        ours: dict[str, Any] = {"slot_dir": engine.flags.slot_save_path, "save_pause": lab.PAUSE_SECONDS}
        async with (
            lab.in_front_of(engine.base, **(ours | settings)) as sidecar,
            Target(lab.url_of(sidecar), [engine.base]) as target,
        ):
            yield Session(engine=engine, sidecar=sidecar, target=target, counter=counter)


def new(count: int) -> Iterator[Shot]:
    """Return prompts that share only the template's first tokens."""
    for number in range(count):
        messages = [system(prose(12_000, 700 + 31 * number)), user(900 + number)]
        body = {"messages": messages, "max_tokens": 8, "temperature": 0}
        yield Shot(session=f"new {number}", label="new", path=CHAT, body=body, headers={})


@pytest.mark.parametrize("model", [Tiny.HYBRID, Tiny.DENSE])
async def test_new_prompts_are_no_hits_and_save_no_time(model, build, tmp_path, capsys):
    async with session(model, build, tmp_path) as played:
        for shot in new(NEW):
            await lab.rested(played.sidecar)
            played.samples.append((await played.target.fire(shot)).sample)
        views = await played.views(capsys)
    assert views.state["requests"] == NEW
    assert views.state["hit_rate"] <= 0.01
    assert views.replay.sums.hit_rate == pytest.approx(views.state["hit_rate"], abs=1e-4)
    assert views.state["step_seconds"] == 0
    whole = views.state["reused_seconds"] * views.state["prompt_tokens"] / max(1, views.state["reused"])
    assert views.state["saved_seconds"] <= 0.01 * max(whole, 1e-3)
    assert views.state["waited"] >= 1.0
    assert views.state["client"] + views.state["plant"] >= views.state["oracle"]


async def test_without_the_engines_slots_the_ratios_are_unknown_and_not_perfect(build, tmp_path):
    """Prompts A, B, A, B, A: how much of that a perfect cache computes is not known, so no ratio is shown."""

    def hidden(*args: Any, **more: Any) -> list[str]:
        return [*(word for word in lab.stock_flags(*args, **more) if word != "--slots"), "--no-slots"]

    ours: Document = {"listen": lab.ANY_PORT, "admin_listen": lab.ANY_PORT, "drain_delay": 0}
    async with (
        lab.tiny_engine(Tiny.HYBRID, build, tmp_path, context_tokens=CONTEXT, recipe=hidden) as engine,
        running(lab.settings_of(upstream=(engine.base,), read_flags=False, **ours)) as sidecar,
        aiohttp.ClientSession(lab.url_of(sidecar)) as client,
    ):
        link = next(iter(sidecar.driver.links.values()))
        await until(lambda: link.unknown is Unknown.NO_SLOTS, "the engine refuses GET /slots")
        for shot in [*new(2), *new(2), *new(1)]:
            async with client.post(CHAT, json=shot.body) as answer:
                assert answer.status == 200
                await answer.read()  # a client that leaves earlier may leave before the end of its answer
        async with aiohttp.ClientSession(f"http://{sidecar.addresses[1]}") as admin:
            async with admin.get("/api/state") as answer:
                state = sums_in(await answer.json())
            async with admin.get("/api/requests") as answer:
                why = (await answer.json())["requests"]
        metrics = counted(sidecar.driver.metrics)
        value = sidecar.driver.metrics.registry.get_sample_value
        assert value("slotkeeper_unknown_requests_total", {"reason": "no_slots"}) == 5
    assert (state["requests"], state["waited"], state["total"]) == (5, None, None)
    assert (state["unknown"], state["unknown_requests"]) == ({"no_slots": 5}, 5)
    assert state["unknown_tokens"] == state["client"] + state["plant"] > 0
    assert metrics["oracle"] == state["oracle"] == 0
    assert {one["oracle_unknown"] for one in why} == {"no_slots"}


async def test_waited_does_not_rise_while_a_long_prompt_is_planted(build, tmp_path, capsys):
    """Its plants and its oracle are counted at the same moment, in sums and in metrics."""
    async with session(Tiny.HYBRID, build, tmp_path) as played:
        first, second = list(new(2))
        played.samples.append((await played.target.fire(first)).sample)
        await lab.rested(played.sidecar)
        metrics = played.sidecar.driver.metrics
        before, seen, most = metrics.history.totals.waited, [], 0
        async with asyncio.TaskGroup() as group:
            sent = group.create_task(played.target.fire(second))
            while not sent.done():
                await asyncio.sleep(0.01)
                now = counted(metrics)
                seen.append((now["client"] + now["plant"]) / now["oracle"])
                most = max(
                    most,
                    *(
                        record.work.planted + record.work.planting if record.work else 0
                        for record in played.sidecar.driver.journal
                    ),
                )
        assert most > 0, "nothing was planted"
        assert max(seen) == pytest.approx(before, rel=0.02)


CONVERSATION: Final = [system(prose(9000, 5)), user(1)]


def side(number: int) -> Script:
    yield Turn(label="title", messages=title([*CONVERSATION, user(number)]), max_tokens=8)


def turns(number: int, count: int = 2) -> Script:
    """Return turns under a shared system prompt; the second diverges from the others at its end."""
    history = [CONVERSATION[0], user(50 + number)]
    for turn in range(count):
        reply = yield Turn(label=f"turn {turn}", messages=tuple(history), max_tokens=24)
        history += [reply, user(60 + 10 * number + turn)]


async def mixed(played: Session) -> None:
    """Play shared beginnings (plants), pauses (idle work), rules that fix, a side request, and a restart."""
    for number in range(3):
        await played.play(turns(number), f"talk {number}")
    await played.play(turns(3, count=7), "long talk")  # after some turns the next one is prepared
    await played.play(side(1), "side")
    await played.play(REWRITERS[RuleName.TOOL_ORDER](), "agent")
    await played.restart()
    await played.play(turns(1), "talk 1 again")
    await played.play(REWRITERS[RuleName.DATE](), "another agent")
    await played.leave({"messages": [CONVERSATION[0], user(77)], "temperature": 0})


@pytest.fixture(params=[Tiny.HYBRID, Tiny.DENSE], ids=str)
def model(request) -> Tiny:
    return request.param


async def test_all_views_of_a_session_agree_with_each_other_and_with_the_engine(
    model, build, tmp_path, capsys
):
    async with session(model, build, tmp_path, rules=("all=fix",)) as played:
        await mixed(played)
        views = await played.views(capsys)
    state, replay = views.state, views.replay.sums

    # The session must have all of these, or the checks below prove nothing.
    assert state["idle"] > 0
    assert state["prepared"] > 0
    assert state["probe"] > 0
    assert any(sample.rewritten for sample in played.samples)
    assert any(one["decision"] == "snapshot" for one in views.why)
    assert model is Tiny.DENSE or state["plant"] > 0
    (left,) = [one for one in views.why if one["outcome"] == "client_gone"]

    assert {name: state[name] for name in views.metrics} == views.metrics
    for name, metric in (("compared_seconds", "compared_wait"), ("least_seconds", "least_wait")):
        sums = played.sidecar.metrics.registry.get_sample_value(f"slotkeeper_{metric}_seconds_total")
        assert state[name] == pytest.approx(sums, abs=1e-4), name
        assert state[name] > 0, "prefills have told the engine's speed"
    for name in ("reused", "computed", "prepared", "oracle"):
        assert views.sum_in_why(name) == state[name], name
    assert views.sum_in_why("planted") == state["plant"]
    assert views.sum_in_why("prompt_tokens") == state["prompt_tokens"] == state["reused"] + state["computed"]
    assert state["requests"] == len(views.why) == len(played.samples) + 1

    # A replay measures its own requests from outside; the client that left was not one of them.
    for name in ("prompt_tokens", "reused", "computed"):
        assert getattr(replay, name) == state[name] - left[name], name
    assert replay.plant == state["plant"] - left["planted"]
    assert replay.client == state["client"] - (left["prompt_tokens"] - left["cached"])

    # The engine's own counter, to the token.
    assert views.engine == state["client"] + state["plant"] + state["idle"] + state["probe"]
    weighed = state["client"] + state["plant"] - state["unknown_tokens"]
    assert state["waited"] == pytest.approx(weighed / state["oracle"], abs=1e-4)
    assert state["unknown_requests"] == sum(one["oracle_unknown"] is not None for one in views.why)
    for name in ("reused", "computed", "idle"):
        assert tokens(state[name]) in views.top
