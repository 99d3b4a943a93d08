"""What works on which build and kind of memory: a table made from the tests, for docs/when-you-need-it.md.

`PYTHONPATH=proxy:tests:. python -m compatibility` prints it. A test shows a feature by the mark
`shows(Feature.…)`; the model is in its parameters, or named in the mark.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections import defaultdict
from enum import StrEnum
from typing import Final

import pytest

from builds import NEWER
from slotkeeper.bench.models import Tiny

BOTH: Final = "both"
KINDS: Final = {
    Tiny.DENSE: "dense",
    Tiny.SWA: "sliding window",
    Tiny.HYBRID: "hybrid",
    Tiny.HYBRID_MTP: "hybrid with MTP",
    Tiny.RECURRENT: "recurrent",
}
NAMED: Final = re.compile(r"\b(hybrid-mtp|mtp|dense|swa|hybrid|recurrent)\b")
SHORT: Final = {"mtp": Tiny.HYBRID_MTP}


class Feature(StrEnum):
    """The rows of the table."""

    PREDICTED = "reuse is predicted before each request"
    HEAD = "a clock in the system prompt"
    EDITS = "edits, branches, steps back"
    DOCUMENT = "questions about a long document"
    CROWD = "more conversations than slots"
    NEXT = "the next turn is computed in pauses"
    FIRST = "an engine's first seconds count"
    FLAGS = "checkpoint flags are found out"
    KILLED = "restart of the engine (`kill -9`)"
    SIDECAR = "restart of the sidecar"
    SAME = "answers after a restore are the same"
    DRAFTS = "drafts are accepted after a restart"
    SLEEP = "a sleeping engine is not woken"
    MOVES = "a conversation moves to another engine"
    SWAPS = "model swaps: router"
    SWAPPED = "model swaps: llama-swap"
    POOL = "one KV buffer for all slots"
    PRIORITY = "priorities"
    KEYS = "keys are kept apart"
    ADAPTERS = "LoRA adapters are kept apart"
    IMAGES = "images"


class Collector:
    """A pytest plugin that notes on which build and model each feature is tested."""

    def __init__(self) -> None:
        self.seen: defaultdict[tuple[Feature, Tiny], set[str]] = defaultdict(set)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            assert isinstance(item, pytest.Function), item
            for mark in item.iter_markers("shows"):
                feature, *models = mark.args
                for model in models or [_model(item)]:
                    self.seen[feature, model].add(_build(item))


def _model(item: pytest.Function) -> Tiny:
    """Return the model that the name of a case contains."""
    found = NAMED.search(item.callspec.id) if hasattr(item, "callspec") else None
    if not found:
        raise ValueError(f"{item.nodeid}: name its model in the mark `shows`")
    return SHORT.get(found[1]) or Tiny(f"tiny-{found[1]}")


def _build(item: pytest.Function) -> str:
    return str(item.callspec.params.get("build", NEWER)) if hasattr(item, "callspec") else NEWER


def table() -> str:
    """Return the table as Markdown."""
    collector = Collector()
    collect = ["--collect-only", "-q", "-p", "no:randomly", "-m", "shows", "tests/engine"]
    with contextlib.redirect_stdout(io.StringIO()) as told:
        code = pytest.main(collect, plugins=[collector])
    if code:
        raise SystemExit(told.getvalue()[-2000:])
    lines = [f"| | {' | '.join(KINDS.values())} |", f"|---{'|---' * len(KINDS)}|"]
    for feature in Feature:
        cells = (_cell(collector.seen[feature, model]) for model in KINDS)
        lines.append(f"| {feature} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(builds: set[str]) -> str:
    return BOTH if len(builds) > 1 else NEWER if builds == {NEWER} else "older" if builds else ""


if __name__ == "__main__":
    sys.stdout.write(table())
