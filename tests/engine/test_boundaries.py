"""Where prompts diverge: tokens computed again with the flags of `slotkeeper up` and a slot folder."""

import asyncio
from dataclasses import dataclass, field

import pytest
from benchmarks.sessions import AGENTS, SESSIONS, agent

from builds import OLDER
from compatibility import Feature
from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.bench.measure import Sample
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.target import Target, at_once, play
from slotkeeper.scheduler.slots.engine_model import SnapshotId

pytestmark = pytest.mark.one_in(8)

OWN_PART = 200  # tokens of an agent's own task, and a few more
CONTEXT = 32768  # tokens of a slot
UNCUTTABLE = [Tiny.SWA, Tiny.HYBRID, Tiny.HYBRID_MTP, Tiny.RECURRENT]


@dataclass
class Played:
    """Requests, and what they cost."""

    sidecar: Sidecar
    samples: list[Sample] = field(default_factory=list)
    files: set[SnapshotId] = field(default_factory=set)
    evaluated: int = 0  # by the engine's counter, without idle work

    def seen(self, sample: Sample) -> None:
        assert sample.counted, sample
        self.samples.append(sample)

    def cost(self, *, skipped: int = 1) -> tuple[int, int]:
        """Return (tokens computed, oracle), without the first requests."""
        samples = self.samples[skipped:]
        return sum(s.computed or 0 for s in samples), sum(s.oracle or 0 for s in samples)


async def played(
    model: Tiny, build: str, folder, session: str, *args: str, pauses: bool = False, **settings: int
) -> Played:
    async with (
        lab.tiny_engine(model, build, folder, *args, recipe=lab.up_flags, context_tokens=CONTEXT) as engine,
        lab.keeping(engine, **settings) as sidecar,
        Target(lab.url_of(sidecar)) as target,
    ):
        found = Played(sidecar)

        async def rest(_) -> None:
            await lab.rested(sidecar)

        before = rest if pauses else at_once
        began = await lab.evaluated(engine.base)
        await play(SESSIONS[session](), target, session=session, seen=found.seen, before=before)
        await lab.rested(sidecar)  # otherwise running idle work is in only one of the two counts
        found.evaluated = await lab.evaluated(engine.base) - began - lab.spent(sidecar).idle
        return found


@pytest.mark.shows(Feature.HEAD)
@pytest.mark.parametrize("model", UNCUTTABLE)
async def test_a_clock_at_the_end_of_the_system_prompt_costs_no_tokens_from_the_third_turn_on(
    model, build, tmp_path
):
    computed, oracle = (await played(model, build, tmp_path, "clock-last")).cost(skipped=2)
    assert computed <= oracle * 1.05


@pytest.mark.shows(Feature.EDITS)
@pytest.mark.parametrize("model", [Tiny.HYBRID, Tiny.SWA])
@pytest.mark.parametrize("session", ["edits", "many-turns"])
async def test_edits_branches_and_steps_back_cost_little_more_than_the_new_tokens(
    model, session, build, tmp_path
):
    # Files of the older build have no checkpoints, so only what idle work has saved in time can be continued.
    pauses = build == OLDER
    computed, oracle = (await played(model, build, tmp_path, session, pauses=pauses)).cost()
    assert computed <= oracle * 1.10


@pytest.mark.shows(Feature.DOCUMENT)
@pytest.mark.parametrize(
    ("model", "args"), [(Tiny.HYBRID, ("-b", "2048", "-ub", "2048")), (Tiny.HYBRID, ()), (Tiny.SWA, ())]
)
async def test_the_first_further_question_about_a_document_computes_only_the_question(
    model, args, build, tmp_path
):
    found = await played(model, build, tmp_path, "long-document", *args)
    document = found.samples[0].prompt or 0
    computed, oracle = found.cost(skipped=1)
    assert computed <= oracle + 8 * (len(found.samples) - 1)
    assert found.evaluated <= document + 40 * (len(found.samples) - 1)


@pytest.mark.shows(Feature.DOCUMENT)
@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (Tiny.HYBRID, {}),
        (Tiny.HYBRID, {"idle_tokens": 0}),  # nothing is computed ahead: slots are cut back for their files
        (Tiny.HYBRID_MTP, {}),
        (Tiny.RECURRENT, {}),
    ],
)
async def test_idle_work_between_questions_about_a_document_loses_no_tokens_of_the_document(
    model, settings, build, tmp_path
):
    args = ("-b", "2048", "-ub", "2048")
    found = await played(model, build, tmp_path, "long-document", *args, pauses=True, **settings)
    computed, oracle = found.cost(skipped=1)
    assert computed <= oracle + 8 * (len(found.samples) - 1)


@pytest.mark.shows(Feature.NEXT, Tiny.HYBRID)
async def test_in_a_tool_loop_the_client_waits_only_for_new_tokens(build, tmp_path):
    """Its next turn is computed in the pauses; the second request only shows how it sends replies back."""
    found = await played(Tiny.HYBRID, build, tmp_path, "tool-loop", pauses=True)
    computed, oracle = found.cost()
    assert computed <= oracle
    assert all((s.computed or 0) <= (s.oracle or 0) for s in found.samples[2:])


@pytest.mark.parametrize("model", [Tiny.HYBRID, Tiny.DENSE])
async def test_a_new_agent_computes_only_its_own_part_though_others_have_the_slots(model, build, tmp_path):
    found = await played(model, build, tmp_path, "agents")
    first = [at for at, sample in enumerate(found.samples) if sample.label.endswith("call")]
    assert len(first) == AGENTS
    for at in first[1:]:
        sample = found.samples[at]
        assert (sample.computed or 0) <= (sample.oracle or 0) + 64, sample


async def test_a_shared_prefix_of_agents_that_begin_at_once_is_computed_once(build, tmp_path):
    async with (
        lab.tiny_engine(Tiny.HYBRID, build, tmp_path, recipe=lab.up_flags, context_tokens=CONTEXT) as engine,
        lab.keeping(engine) as sidecar,
        Target(lab.url_of(sidecar)) as target,
    ):
        found = Played(sidecar)
        async with asyncio.TaskGroup() as group:
            for number in range(3):
                script = agent(number)
                group.create_task(play(script, target, session=f"agent {number}", seen=found.seen))
    first = [sample for sample in found.samples if sample.label.endswith("call")]
    computed = sum(sample.computed or 0 for sample in first)
    assert computed <= max(sample.prompt or 0 for sample in first) + 2 * OWN_PART
