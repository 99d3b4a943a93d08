from pathlib import Path

import pytest
from benchmarks import tables
from benchmarks.ablations import main, worst
from benchmarks.mechanisms import MECHANISMS, WORSE, without

from slotkeeper.scheduler import candidates

TESTS = Path(__file__).parents[2]


@pytest.mark.parametrize("name", MECHANISMS)
def test_each_name_switches_off_something_that_exists(name):
    with without(name):  # patching a name that is gone raises AttributeError
        pass


def test_joined_names_are_switched_off_together_and_come_back():
    before = candidates._touched, candidates._parking

    with without("touch+parking"):
        during = candidates._touched, candidates._parking

    assert not {*before} & {*during}
    assert before == (candidates._touched, candidates._parking)


def test_an_unknown_name_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--simulated", "--without", "parking+magic"])

    assert "unknown mechanism: magic" in capsys.readouterr().err


def test_each_fault_is_named_by_a_test_that_exists():
    pinned = [path for folder in ("playbooks", "unit/scheduler") for path in (TESTS / folder).glob("*.py")]
    tests = "".join(path.read_text("utf-8") for path in pinned)

    faults = {mechanism.fault for mechanism in MECHANISMS.values()} - {""}

    assert not [fault for fault in faults if f"def {fault}(" not in tests]


def test_each_mechanism_is_kept_for_a_published_row_or_for_a_fault():
    without_row = [row["name"] for row in tables.measured("ablations") if tables.lost(row) < WORSE]

    assert without_row
    assert not [name for name in without_row if not MECHANISMS[name].fault]


def row(ours: float, computed: int, work: str = "chat") -> dict[str, object]:
    return {
        "profile": "card",
        "work": work,
        "stock": 100.0,
        "ours": ours,
        "stock_computed": 1000,
        "computed": computed,
    }


def test_the_worst_row_is_the_one_whose_published_ratio_rises_most():
    whole = [row(50.0, 500), row(10.0, 100, "agents")]
    left_out = [row(60.0, 500), row(10.0, 250, "agents")]

    found = worst("touch", left_out, whole)

    assert found["worst"] == {
        "profile": "card",
        "work": "agents",
        "unit": "tokens",
        "with": 0.1,
        "left_out": 0.25,
    }
    assert found["sums"] == {"seconds": 1.1667, "tokens": 1.25}
    assert found["changes"]
