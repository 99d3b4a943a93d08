"""Figures of the documents, from the last runs."""

from __future__ import annotations

import orjson
from benchmarks.publish import collect

RUN = {"version": "1", "at": "today", "cores": 2}


def test_a_build_that_a_run_did_not_measure_keeps_its_figures(tmp_path):
    before = {"crowd": RUN | {"at": "before", "figures": [{"build": "a", "n": 1}, {"build": "b", "n": 1}]}}
    new = RUN | {"figures": {"rows": [{"build": "b", "n": 2}]}}
    (tmp_path / "crowd.json").write_bytes(orjson.dumps(new))
    found = collect(tmp_path, before)["crowd"]
    assert found == RUN | {"figures": [{"build": "a", "n": 1}, {"build": "b", "n": 2}]}


def test_figures_without_builds_are_those_of_the_last_run(tmp_path):
    before = {"pool": RUN | {"figures": [{"chats": 4}, {"chats": 8}]}}
    (tmp_path / "pool.json").write_bytes(orjson.dumps(RUN | {"figures": [{"chats": 4}]}))
    assert collect(tmp_path, before)["pool"]["figures"] == [{"chats": 4}]
