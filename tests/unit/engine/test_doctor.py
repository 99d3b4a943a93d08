"""Findings of the doctor for several stock engines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slotkeeper.cli.doctor import about_budget
from slotkeeper.engine.findings import Finding, SaveSupport, Severity, examine
from slotkeeper.engine.flags import EngineFlags
from slotkeeper.scheduler.slots.engine_model import EngineTraits, Known, Memory
from slotkeeper.scheduler.snapshots.budgets import GIB, Budgets

GOOD = EngineTraits(
    n_slots=2,
    n_ctx=32768,
    memory=Memory.HYBRID,
    checkpoint_cap=64,
    eager_thinning=False,
    user_start=((1, 2),),
)
PROPS = {"chat_template": "x"}
LINE = EngineFlags.parse(["-np", "2"])
NEED = ("need", Severity.NOTE)  # in every report: whether the server alone is enough


def traps(traits=GOOD, flags=LINE, props=PROPS, *, slots=True, metrics=True, save=SaveSupport.YES):
    found = examine(traits, flags, props, slots_ok=slots, metrics_ok=metrics, slot_save=save)
    return {(finding.trap, finding.severity) for finding in found} - {NEED}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"memory": Memory.DENSE, "checkpoint_cap": 0, "eager_thinning": True, "user_start": ()},
        {"eager_thinning": True, "checkpoint_min_step": 0},
    ],
    ids=["hybrid", "dense: it needs no checkpoints", "thinning turned off"],
)
def test_a_well_configured_engine_gets_one_ok(change):
    assert traps(replace(GOOD, **change)) == {("flags", Severity.OK)}


@pytest.mark.parametrize(
    ("change", "trap", "severity"),
    [
        ({"n_slots": 1}, "one-slot", Severity.WARN),
        ({"unified": True}, "T6", Severity.FAIL),
        ({"unified": True, "knowledge": {"unified": Known.FLAGS}}, "pool", Severity.WARN),
        ({"n_ctx": 4096}, "context", Severity.WARN),
        ({"eager_thinning": True}, "T7", Severity.WARN),
        ({"checkpoint_min_step": 0}, "T7", Severity.WARN),
        ({"checkpoint_cap": 0}, "checkpoints", Severity.FAIL),
        ({"checkpoint_cap": 4}, "checkpoints", Severity.WARN),
        ({"memory": Memory.SWA}, "T4", Severity.NOTE),
        ({"memory": Memory.SWA, "swa_full": True}, "T9", Severity.NOTE),
        ({"memory": Memory.UNKNOWN}, "memory", Severity.NOTE),
        ({"ram_cache": False, "idle_copy": False}, "ram-cache", Severity.NOTE),
        ({"speculative": True}, "draft", Severity.NOTE),
        ({"n_batch": 8192}, "batch", Severity.NOTE),
        ({"n_ubatch": 2048}, "ubatch", Severity.NOTE),
        ({"user_start": ()}, "template", Severity.NOTE),
    ],
)
def test_a_trait_that_costs_tokens_is_reported(change, trap, severity):
    assert (trap, severity) in traps(replace(GOOD, **change))


@pytest.mark.parametrize(
    ("routed", "cached", "advice"),
    [
        (False, False, "Use --cache-ram 8192."),
        (False, True, None),
        (True, True, "Add --cache-ram 0."),
        (True, False, None),
    ],
)
def test_a_ram_cache_is_advised_except_for_the_models_of_a_router(routed, cached, advice):
    """As docs/models.md advises: each swap loses that cache."""
    traits = replace(GOOD, ram_cache=cached, idle_copy=False)
    found = examine(
        traits, None, PROPS, slots_ok=True, metrics_ok=True, slot_save=SaveSupport.YES, routed=routed
    )
    assert next((one.do for one in found if one.trap == "ram-cache"), None) == advice


def test_missing_routes_are_reported():
    assert traps(slots=False, metrics=False, save=SaveSupport.NO) == {
        ("slots", Severity.FAIL),
        ("metrics", Severity.NOTE),
        ("snapshots", Severity.WARN),
    }
    assert ("snapshots", Severity.NOTE) in traps(save=SaveSupport.UNKNOWN)
    assert ("template", Severity.WARN) in traps(props={})


def test_findings_from_slot_files_replace_those_from_the_flag():
    seen = Finding(trap="snapshots", severity=Severity.OK, what="They work.")
    looked = examine(
        GOOD, LINE, PROPS, slots_ok=True, metrics_ok=True, slot_save=SaveSupport.NO, files=[seen]
    )
    assert [(found.trap, found.severity) for found in looked] == [
        NEED,
        ("snapshots", Severity.OK),
        ("flags", Severity.OK),
    ]


@pytest.mark.parametrize(
    ("line", "trap"),
    [("--sleep-idle-seconds 60", "sleep"), ("--api-key k", "key"), ("--host 0.0.0.0", "T1")],
)
def test_flags_that_cost_performance_or_safety_are_reported(line, trap):
    assert trap in {name for name, _ in traps(flags=EngineFlags.parse(["-np", "2", *line.split()]))}


def test_a_sleeping_engine_is_reported():
    assert ("sleep", Severity.WARN) in traps(flags=None, props=PROPS | {"is_sleeping": True})


def test_four_slots_of_unknown_origin_are_noted():
    assert ("T6", Severity.NOTE) in traps(replace(GOOD, n_slots=4), flags=None)
    assert ("T6", Severity.NOTE) not in traps(replace(GOOD, n_slots=4), flags=LINE)


def test_findings_are_sorted_by_severity():
    bad = replace(GOOD, n_slots=1, checkpoint_cap=0, speculative=True)
    found = examine(bad, LINE, PROPS, slots_ok=True, metrics_ok=True, slot_save=SaveSupport.YES)
    assert [finding.severity for finding in found] == [Severity.FAIL, Severity.WARN, *[Severity.NOTE] * 2]


@pytest.mark.parametrize(
    ("traits", "line", "sentence"),
    [
        ({"memory": Memory.DENSE, "token_bytes": 131072}, ["-cram", "1024"], "holds about 8,192 tokens"),
        ({"memory": Memory.DENSE, "token_bytes": 131072}, None, "holds by default about 65,536 tokens"),
        ({"memory": Memory.DENSE}, [], "for one client that only appends, the server alone is enough"),
        (
            {"memory": Memory.DENSE, "ram_cache": False},
            [],
            "loses a conversation whenever another takes its slot",
        ),
        ({"memory": Memory.HYBRID}, [], "Slotkeeper is worth it"),
        ({"memory": Memory.SWA, "swa_full": True}, [], "the server alone is enough"),
    ],
)
def test_the_report_says_whether_the_server_alone_is_enough_for_this_engine(traits, line, sentence):
    flags = None if line is None else EngineFlags.parse(line)
    found = examine(
        replace(GOOD, **traits), flags, PROPS, slots_ok=True, metrics_ok=True, slot_save=SaveSupport.YES
    )
    (need,) = (finding for finding in found if finding.trap == "need")
    assert sentence in need.what
    assert "slotkeeper docs when-you-need-it" in need.do


def test_a_folder_for_fewer_than_two_conversations_gets_a_warning_that_says_what_to_set():
    assert list(about_budget(Budgets(hot=2 * GIB, cold=0, hourly=0, largest=GIB))) == []
    (found,) = about_budget(Budgets(hot=3 * GIB, cold=0, hourly=0, largest=2 * GIB))
    assert found.severity is Severity.WARN
    assert "3.0 GiB of this disk: room for 1 conversation of full context (2.0 GiB each)" in found.what
    assert "--hot-bytes 4GiB" in found.do
