"""Names that users build on stay, with their meaning: contracts.yaml has those of the last release."""

from __future__ import annotations

import pytest
import yaml

from frozen.contracts import CONTRACTS, POLICY, broken, contracts, main, recorded, written
from slotkeeper.api import head


@pytest.fixture(scope="module")
def now():
    return contracts()


def test_no_recorded_name_is_gone_or_means_something_else(now):
    assert recorded(), "nothing is recorded"
    gone = list(broken(recorded(), now))
    assert not gone, "\n".join(gone) + POLICY


def test_every_name_is_recorded(now):
    assert CONTRACTS.read_text("utf-8") == written(now), (
        "new names: run `make contracts`, and commit the file"
    )


def test_every_kind_has_names(now):
    assert [kind for kind, names in now.items() if not names] == []


def test_the_reference_names_every_header_that_is_ours(now):
    ours = {
        value for value in vars(head).values() if isinstance(value, str) and value.startswith("X-Slotkeeper-")
    }
    assert len(ours) > 5
    told = {*now["headers of requests"], *now["headers of responses"]}
    assert {name for name in told if name.startswith("X-Slotkeeper-")} == ours


BEFORE = {
    "headers": ["X-A", "X-B"],
    "metrics": {"tokens_total": {"type": "counter by kind", "kind": ["new", "old"]}},
    "settings": {"SIZE": "--size SIZE (auto)"},
}


@pytest.mark.parametrize(
    ("kind", "names", "said"),
    [
        ("headers", ["X-B", "X-C", "X-A"], []),
        ("headers", ["X-B"], ["headers: X-A is gone"]),
        ("settings", {"SIZE": "--size SIZE (auto)", "MORE": ""}, []),
        ("settings", {}, ["settings: SIZE is gone"]),
        (
            "settings",
            {"SIZE": "--size SIZE (0)"},
            ["settings: SIZE was '--size SIZE (auto)', now '--size SIZE (0)'"],
        ),
        ("metrics", {"tokens_total": {"type": "counter by kind", "kind": ["old", "new", "third"]}}, []),
        (
            "metrics",
            {"tokens_total": {"type": "counter", "kind": ["new"]}},
            [
                "metrics: tokens_total: type was 'counter by kind', now 'counter'",
                "metrics: tokens_total: kind: old is gone",
            ],
        ),
    ],
)
def test_what_users_would_miss_is_named_and_additions_are_not(kind, names, said):
    assert list(broken(BEFORE, BEFORE | {kind: names})) == said


def test_a_kind_that_is_gone_is_named():
    assert list(broken(BEFORE, {"headers": BEFORE["headers"]})) == ["metrics is gone", "settings is gone"]


def test_only_additions_are_recorded_without_being_asked_twice(now, tmp_path, capsys):
    path = tmp_path / "contracts.yaml"
    fewer = now | {"settings": dict(list(now["settings"].items())[1:])}
    path.write_text(written(fewer), "utf-8")
    assert main([], path) == 0
    assert path.read_text("utf-8") == written(now)

    more = written(now | {"alerts": [*now["alerts"], "SlotkeeperGone"]})
    path.write_text(more, "utf-8")
    assert main([], path) == 1
    assert "alerts: SlotkeeperGone is gone" in capsys.readouterr().err
    assert path.read_text("utf-8") == more
    assert main(["--break"], path) == 0
    assert yaml.safe_load(path.read_text("utf-8")) == yaml.safe_load(written(now))
