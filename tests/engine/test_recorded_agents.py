"""Recorded sessions of real agents, sent to the real engine through a sidecar with rules that fix.

Every other session runs on the newer build: what rules send is the same on both. `make test-remaining` runs
the long sessions.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import recorded
from builds import NEWER, OLDER
from slotkeeper.bench import lab
from slotkeeper.bench.measure import totals
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.replay import generates, merged, read, shot
from slotkeeper.bench.target import Target

CONTEXT = 49152  # the longest prompt has 42,399 tokens
REPLY = 16  # tokens: the history is the recorded one, whatever the engine answers
AT_MOST = 1.02  # times the oracle of what the client sent

# Includes plants: where a text diverges for the first time in its middle there is no checkpoint yet. Short
# sessions, and one that writes its files again in each request, cannot make up for that. The one of
# mini-swe-agent goes back to its first message. On the older build a slot that was cut and restored in a
# pause has lost that checkpoint, and whether the session pauses for so long depends on the machine.
WITH_PLANTS = {
    "aider/main1": 1.12,
    "claude-code/trace-0100": 1.12,
    "claude-code/trace-0300": 1.12,
    "mini-swe-agent/main1": 1.12,
}
ANYBODY_WITH_PLANTS = 1.06

BUILDS = (OLDER, NEWER)
LONG_BYTES = 20_000  # of a compressed session: the engine needs 20 to 70 s for it
DEALT = [
    pytest.param(
        path,
        BUILDS[at % 2],
        id=recorded.name(path),
        marks=[pytest.mark.remaining] if path.stat().st_size > LONG_BYTES else [],
    )
    for at, path in enumerate(recorded.sessions())
]


@recorded.needed
@pytest.mark.parametrize(("path", "kind"), DEALT)
async def test_recorded_agents_compute_little_more_than_the_oracle(path: Path, kind: str, tmp_path):
    entries = [entry for entry in merged([read(path)]) if generates(entry)]
    async with (
        lab.tiny_engine(Tiny.HYBRID, kind, tmp_path, context_tokens=CONTEXT, recipe=lab.up_flags) as engine,
        lab.keeping(engine, rules=("all=fix",)) as sidecar,
        Target(lab.url_of(sidecar)) as target,
    ):
        found = [(await target.fire(shot(entry, REPLY))).sample for entry in entries]
    assert [sample.failure for sample in found if sample.failure] == []
    sums = totals(found)
    assert sums.sums.client <= AT_MOST * sums.oracle
    most = WITH_PLANTS.get(recorded.name(path), ANYBODY_WITH_PLANTS)
    assert sums.computed <= most * sums.oracle
