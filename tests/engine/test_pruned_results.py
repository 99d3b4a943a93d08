"""Agents that prune old results, on the real engine: tokens computed, and the size of the context."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from benchmarks.pruners import PRUNERS, pruned

import recorded
from slotkeeper.bench import lab
from slotkeeper.bench.measure import Sample, totals
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.replay import generates, merged, read, shot
from slotkeeper.bench.target import PLAIN, Script, Target, Turn, play
from slotkeeper.bench.texts import prose, result, system
from slotkeeper.conversation.rules.base import Room, RuleName
from slotkeeper.engine.child.launch import EngineKind

pytestmark = pytest.mark.one_in(8)

RULES = (f"{RuleName.PRUNED_RESULTS}=fix",)
REPLY = 8  # tokens
AT_MOST = 1.05  # times the oracle of what the client sent


def tasks(way: str) -> Script:
    """Return four tasks of three calls each, of which an agent prunes the results in its way."""
    agent = PRUNERS[way]()
    history = [system(prose(1500, 1))]
    for task in range(4):
        history.append({"role": "user", "content": f"Task {task}. {prose(200, 10 + task)}"})
        for number in range(3):
            yield asked(agent(history))
            name = f"call_{task}_{number}"
            function = {"name": "read_file", "arguments": '{"path": "a.py"}'}
            call = {"id": name, "type": "function", "function": function}
            said = {"role": "assistant", "content": "", "tool_calls": [call]}
            history += [said, result(said, prose(1500, 20 + 3 * task + number))]
        yield asked(agent(history))
        history.append({"role": "assistant", "content": f"Task {task} is done."})


def asked(messages: Sequence[dict[str, object]]) -> Turn:
    return Turn(label=f"{len(messages)} messages", messages=tuple(messages), max_tokens=REPLY, fields=PLAIN)


async def played(way: str, build: str, folder: Path, context: int) -> tuple[list[Sample], float]:
    """Return its requests, and how many of them were sent changed."""
    async with (
        lab.tiny_engine(Tiny.HYBRID, build, folder, context_tokens=context, recipe=lab.up_flags) as engine,
        lab.keeping(engine, rules=RULES) as sidecar,
        Target(lab.url_of(sidecar)) as target,
    ):
        found = await play(tasks(way), target, session=way)
        value = sidecar.metrics.registry.get_sample_value
        fixed = value("slotkeeper_rewrites_total", {"rule": RULES[0].partition("=")[0], "action": "fixed"})
        assert [sample.failure for sample in found if sample.failure] == []
        return found, fixed or 0.0


@pytest.mark.parametrize("way", ["openhands", "openclaw"])
async def test_with_enough_context_pruned_results_are_restored_and_cost_fewer_tokens_than_the_oracle(
    way, build, tmp_path
):
    found, fixed = await played(way, build, tmp_path, 16384)
    assert fixed == len(found) - 5  # the first pruned one is the fifth: three results stay, and one is new
    sums = totals(found)
    assert sums.computed <= 0.75 * sums.oracle, "what the client moves is not computed again"


async def test_without_enough_context_the_clients_own_text_is_sent(build, tmp_path):
    found, fixed = await played("openhands", build, tmp_path, 4096)
    room, sums = Room(4096, REPLY), totals(found)
    assert max(sample.prompt or 0 for sample in found) <= room.limit
    assert sums.computed <= AT_MOST * sums.oracle
    assert let_through(found)
    assert 0 < fixed < len(found) - 5


def let_through(found: Sequence[Sample]) -> bool:
    """Whether a request after changed ones was sent unchanged, and the engine evaluated that prompt."""
    own = [now for before, now in pairwise(found) if before.rewritten and not now.rewritten]
    return bool(own) and all(sample.exact for sample in own)


# -- recorded agents -------------------------------------------------------------------------------------

# As opencode prunes, and as an agent that masks one result per request; sizes as in `pruners`.
DEALT = {
    "main1": "opencode",
    "compact1": "opencode",
    "conc_a": "opencode",
    "conc_b": "openhands",
    "bug1": "openhands",
    "sub1": "openhands",
}
SESSIONS = {recorded.name(path): path for path in recorded.sessions()}


async def replayed(
    session: str, way: str, folder: Path, context: int, rules: Sequence[str] = ("all=fix",)
) -> list[Sample]:
    entries = [entry for entry in merged([read(SESSIONS[f"opencode/{session}"])]) if generates(entry)]
    kind = EngineKind.XLLAMACPP
    async with (
        lab.tiny_engine(Tiny.HYBRID, kind, folder, context_tokens=context, recipe=lab.up_flags) as engine,
        lab.keeping(engine, rules=tuple(rules)) as sidecar,
        Target(lab.url_of(sidecar)) as target,
    ):
        found = [(await target.fire(shot(entry, REPLY))).sample for entry in pruned(entries, way)]
        assert [sample.failure for sample in found if sample.failure] == []
        return found


@recorded.needed
@pytest.mark.parametrize(("session", "way"), DEALT.items(), ids=DEALT)
async def test_recorded_sessions_with_pruning_compute_little_more_than_the_oracle(session, way, tmp_path):
    sums = totals(await replayed(session, way, tmp_path, 49152))
    assert sums.computed <= AT_MOST * sums.oracle


@recorded.needed
async def test_a_recorded_session_that_outgrows_the_context_stays_within_it(tmp_path):
    context = 16896  # its own longest prompt has 15,300 tokens, and 18,800 with all of its results
    found = await replayed("main1", "openhands", tmp_path, context, ("all=off", *RULES))
    sums = totals(found)
    assert sums.computed <= AT_MOST * sums.oracle
    assert max(sample.prompt or 0 for sample in found) <= Room(context, REPLY).limit
    assert let_through(found)
