"""Runs the benchmarks in `PROGRAMS`, one after the other: `python -m benchmarks`, or `make bench`."""

from __future__ import annotations

from benchmarks import (
    append_turn,
    boundaries,
    cases,
    cold_bytes,
    crowd,
    demo,
    engines,
    first_byte,
    found_flags,
    growth,
    hard_bodies,
    idle,
    idle_work,
    large_files,
    matchers,
    pool,
    profiles,
    prompt_tree,
    restart,
    retention,
    rewriting,
    scenarios,
    simulated_engines,
    store_bytes,
    streaming,
    swaps,
    watching,
    when_needed,
)
from benchmarks.figures import console

PROGRAMS = (
    demo,
    prompt_tree,
    matchers,
    simulated_engines,
    profiles,
    first_byte,
    append_turn,
    streaming,
    watching,
    idle,
    hard_bodies,
    growth,
    restart,
    swaps,
    engines,
    pool,
    large_files,
    cold_bytes,
    store_bytes,
    retention,
    idle_work,
    rewriting,
    scenarios,
    boundaries,
    when_needed,
    crowd,
    cases,
    found_flags,
)

for program in PROGRAMS:
    console.rule(program.__name__.removeprefix("benchmarks."))
    if code := program.main([]):
        raise SystemExit(code)
