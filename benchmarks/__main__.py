"""All benchmarks, the quick ones first: `python -m benchmarks`, or `make bench`."""

from __future__ import annotations

from benchmarks import append_turn, first_byte, growth, restart, scenarios
from benchmarks.figures import console

for program in (first_byte, append_turn, growth, restart, scenarios):
    console.rule(program.__name__.removeprefix("benchmarks."))
    if code := program.main([]):
        raise SystemExit(code)
