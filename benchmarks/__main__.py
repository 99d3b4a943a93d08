"""All benchmarks, the quick ones first: `python -m benchmarks`, or `make bench`."""

from __future__ import annotations

from benchmarks import append_turn, first_byte, growth, large_files, restart, retention, scenarios
from benchmarks.figures import console

for program in (first_byte, append_turn, growth, restart, large_files, retention, scenarios):
    console.rule(program.__name__.removeprefix("benchmarks."))
    if code := program.main([]):
        raise SystemExit(code)
