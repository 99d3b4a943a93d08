"""Cells of the tables in the documents."""

import pytest
from benchmarks import tables
from benchmarks.engine_profiles import PROFILES
from benchmarks.profile_work import ABOUT


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("lhl/strix-halo-testing#33", "[strix-halo-testing#33](https://github.com/lhl/strix-halo-testing/issues/33)"),
        ("ggml-org/llama.cpp#34", "[llama.cpp#34](https://github.com/ggml-org/llama.cpp/issues/34)"),
        ("some/speeds, README.md", "[speeds](https://github.com/some/speeds/blob/HEAD/README.md)"),
        ("our own run", "our own run"),
    ],
)  # fmt: skip
def test_a_source_is_a_link_if_it_is_in_a_repository(source, shown):
    assert tables._linked(source) == shown


def test_a_workload_that_saves_little_on_all_engines_shares_a_line(monkeypatch):
    saved = dict.fromkeys(ABOUT, 5.4) | {"crowd": 3600.0, "tasks": -7.6}
    rows = [
        {"work": work, "profile": profile.name, "saved_an_hour": seconds}
        for work, seconds in saved.items()
        for profile in PROFILES
    ]
    monkeypatch.setattr(tables, "measured", lambda _: rows)

    _, _, crowd, _, others = tables.profile_saved().splitlines()

    assert crowd.startswith("| crowd | 3,600 |")
    assert others == f"{', '.join(work for work in ABOUT if work != 'crowd')}: -8 to 5"
