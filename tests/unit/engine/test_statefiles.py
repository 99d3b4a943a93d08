"""The largest size of a state, and notes on an engine's slot files."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slotkeeper.bench.models import Tiny, build
from slotkeeper.engine.answers import NoFilesError, Why
from slotkeeper.engine.child.memory import state_bytes
from slotkeeper.engine.findings import Severity, about_files
from slotkeeper.engine.flags import EngineFlags
from slotkeeper.engine.traits import Reading
from slotkeeper.scheduler.slots.engine_model import EngineTraits, Memory
from slotkeeper.vocab.gguf import read_header

OURS = EngineFlags()
GOOD = EngineTraits(
    memory=Memory.HYBRID, slot_files=True, state_version=4, files_carry=True, fingerprint="f00d"
)


def findings(traits: EngineTraits = GOOD, flags: EngineFlags | None = OURS, no_files=None) -> set:
    reading = Reading(
        traits=traits, props={}, model={}, model_path=None, header=None, build="", notes=[], no_files=no_files
    )
    return {(finding.trap, finding.severity) for finding in about_files(reading, flags)}


def test_an_engine_with_complete_slot_files_gets_only_ok_findings():
    assert findings() == {("snapshots", Severity.OK), ("files", Severity.OK)}


def test_a_dense_model_needs_no_checkpoints_in_its_file():
    assert findings(replace(GOOD, memory=Memory.DENSE, files_carry=False)) == {("snapshots", Severity.OK)}


@pytest.mark.parametrize(
    ("change", "traps"),
    [
        ({"files_carry": None}, {"files"}),
        ({"files_carry": False, "checkpoint_cap": 0}, {"files"}),
        ({"files_carry": False, "state_version": 2}, {"files"}),
        ({"files_carry": False, "memory": Memory.SWA, "n_swa": 512}, {"files", "T4"}),
        ({"files_carry": True, "memory": Memory.SWA, "n_swa": 512}, set()),
    ],
)
def test_what_a_restored_slot_lacks_is_noted(change, traps):
    notes = {trap for trap, severity in findings(replace(GOOD, **change)) if severity is Severity.NOTE}
    assert notes == traps


def test_an_engine_with_unknown_flags_gets_a_note_on_its_fingerprint():
    assert ("fingerprint", Severity.NOTE) in findings(flags=None)


@pytest.mark.parametrize("why", Why)
def test_every_reason_against_slot_files_is_a_failure(why):
    assert findings(no_files=NoFilesError(why, "detail")) == {("snapshots", Severity.FAIL)}


# Bytes for each token as real engines wrote them (engine.md 12 has the models).
@pytest.mark.parametrize(
    ("model", "at_least"), [(Tiny.DENSE, 528), (Tiny.SWA, 144), (Tiny.HYBRID, 152), (Tiny.HYBRID_MTP, 152)]
)
def test_the_largest_state_is_not_underestimated(model, at_least):
    header = read_header(build(model))
    assert at_least <= state_bytes(header, 1) <= 6 * at_least
    assert state_bytes(header, 1000) == 1000 * state_bytes(header, 1)


def test_smaller_cache_types_give_smaller_states():
    header = read_header(build(Tiny.DENSE))
    flags = EngineFlags.parse(["-ctk", "q8_0", "-ctv", "q4_0"])
    assert state_bytes(header, 1, flags) < state_bytes(header, 1)


def test_a_model_without_attention_is_not_estimated():
    assert state_bytes(read_header(build(Tiny.RECURRENT)), 1000) == 0
