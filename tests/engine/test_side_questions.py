"""Questions beside an agent's conversation, on the real engine: what each way computes, and who may call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.askers import ASKED, ASKERS, HEAD, QUESTION, TOOLS

import recorded
from slotkeeper.bench import lab
from slotkeeper.bench.measure import Sample, Totals, totals
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.replay import Entry, generates, merged, read, shot
from slotkeeper.bench.target import CHAT, PLAIN, Shot, Target, play
from slotkeeper.bench.texts import prose
from slotkeeper.bench.tiny_models import Vocabulary

pytestmark = pytest.mark.one_in(4)

CONTEXT = 16384
RECORDED = Path("codex/compact1.jsonl.xz")
RECORDED_CONTEXT = 32768  # the longest prompt has 20,948 tokens
REPLY = 16  # tokens, in the recorded session
WITH_FIXED = 1.10  # times the new text of a question: the agent's own head and history count as known
WITH_OBSERVED = 1.01  # times stock
GOES_ON = 1.01  # times the same session in which the questions were asked behind the agent's head
AS_MESSAGES = [name for name, asker in ASKERS.items() if not asker.as_text]


@asynccontextmanager
async def target_of(
    build: str, folder: Path, mode: str | None, *, context: int = CONTEXT
) -> AsyncIterator[Target]:
    """Open a sidecar whose rules have this mode, or (None) the engine itself."""
    async with AsyncExitStack() as stack:
        folder = folder / f"{mode}"
        folder.mkdir()
        recipe = {} if mode is None else {"recipe": lab.up_flags}
        opening = lab.tiny_engine(Tiny.HYBRID, build, folder, context_tokens=context, **recipe)
        engine = await stack.enter_async_context(opening)
        base = engine.base
        if mode is not None:
            keeping = lab.keeping(engine, rules=(f"all={mode}",))
            base = lab.url_of(await stack.enter_async_context(keeping))
        yield await stack.enter_async_context(Target(base))


async def played(
    name: str, build: str, folder: Path, mode: str | None, *, ideal: bool = False
) -> list[Sample]:
    """Play one session."""
    async with target_of(build, folder, mode) as target:
        return await play(ASKERS[name](ideal=ideal), target, session=name)


def cost(samples: Sequence[Sample], *, asked: bool | None = None) -> Totals:
    """Return the cost of the questions, of the agent's own requests, or of all."""
    found = totals(one for one in samples if asked is None or (one.label == ASKED) is asked)
    assert not found.failed
    return found


@pytest.mark.parametrize("name", AS_MESSAGES)
async def test_with_rules_that_fix_only_new_text_is_computed_and_the_agent_goes_on(name, build, tmp_path):
    ideal = await played(name, build, tmp_path, None, ideal=True)
    fixed = await played(name, build, tmp_path, "fix")
    assert all(one.rewritten for one in fixed if one.label == ASKED)
    assert cost(fixed, asked=True).computed <= WITH_FIXED * cost(ideal, asked=True).oracle
    assert cost(fixed, asked=False).computed <= GOES_ON * cost(ideal, asked=False).computed


@pytest.mark.parametrize("name", ASKERS)
async def test_with_rules_that_observe_no_more_is_computed_than_by_stock(name, build, tmp_path):
    stock = await played(name, build, tmp_path, None)
    observed = await played(name, build, tmp_path, "observe")
    assert cost(observed).computed <= WITH_OBSERVED * cost(stock).computed


async def test_history_that_is_sent_as_text_goes_as_it_came(build, tmp_path):
    fixed = await played("as text", build, tmp_path, "fix")
    assert not any(one.rewritten for one in fixed if one.label == ASKED)


@recorded.needed
@pytest.mark.remaining
async def test_recorded_compactions_of_codex_compute_only_their_new_text(build, tmp_path):
    """They leave out the tools. The template keeps all reasoning, so the agent's history stays as it was."""
    entries = [entry for entry in merged([read(recorded.FOLDER / RECORDED)]) if generates(entry)]
    async with target_of(build, tmp_path, None, context=RECORDED_CONTEXT) as target:
        ideal = [await fired(target, shot) for shot in shots(entries, ideal=True)]
    async with target_of(build, tmp_path, "fix", context=RECORDED_CONTEXT) as target:
        fixed = [await fired(target, shot) for shot in shots(entries)]
    assert [one.label for one in fixed].count(ASKED) == 2
    assert cost(fixed, asked=True).computed <= WITH_FIXED * cost(ideal, asked=True).oracle


def shots(entries: Sequence[Entry], *, ideal: bool = False) -> Iterator[Shot]:
    """Yield the requests, of which those without tools are the questions; `ideal`: with the agent's tools."""
    offered: list[dict[str, Any]] = []
    for entry in entries:
        one = shot(entry, REPLY)
        asks = not one.body.get("tools")
        offered = offered if asks else one.body["tools"]
        tools = {"tools": offered} if ideal else {}
        yield replace(one, label=ASKED if asks else one.label, body={**one.body, **PLAIN, **tools})


async def fired(target: Target, one: Shot) -> Sample:
    return (await target.fire(one)).sample


async def test_the_answer_calls_no_tool_that_the_client_did_not_offer(build, tmp_path):
    """The model is made to call a tool: it must not end its answer otherwise."""
    task = {"role": "user", "content": f"Begin. {prose(3000)}"}
    history = [HEAD, task, {"role": "assistant", "content": "Where?"}, {"role": "user", "content": "Here."}]
    end = Vocabulary().tokens.index("<|im_end|>")
    calls = {**PLAIN, "max_tokens": 200, "temperature": 0, "logit_bias": [[end, False]]}
    async with target_of(build, tmp_path, "fix") as target:

        async def sends(label: str, **body):
            return await target.fire(Shot(session="s", label=label, path=CHAT, body=body, headers={}))

        first = await sends("agent", messages=history, tools=TOOLS, **calls)
        assert first.reply["tool_calls"]
        history += [{"role": "assistant", "content": first.reply["content"]}]
        asked = {"role": "user", "content": QUESTION}
        answer = await sends(ASKED, messages=[*history, asked], **calls)
    assert answer.sample.rewritten
    assert not answer.reply.get("tool_calls")
    assert answer.reply["content"]
