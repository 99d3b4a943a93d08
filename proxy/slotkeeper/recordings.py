"""The commands that read recorded requests: `replay` and `lint`."""
# ruff: noqa: PLC0415 - each command imports what it needs, so that --help stays quick

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from slotkeeper.config import server

LINT: Final = """\
Read recorded requests, and say where each parts from the one before it: a date in the system prompt, the
git status, tools in another order, reasoning that was left out. Everything behind such a place is computed
again by an engine, though nothing in it changed. No engine is needed. Tokens are counted from characters.
"""
LINT_EPILOG: Final = """\
Example: slotkeeper lint day.jsonl
         slotkeeper lint *.jsonl.xz --json | jq '.findings[] | {client, cause, tokens_about, rule}'
Next:    slotkeeper serve --rules NAME=fix, with the rule that it names
Exit code 0 when nothing was rewritten, 1 when something costs more than 200 tokens, 2 for wrong usage.
A line of a trace is one JSON object: t, client, session, path, headers, body.
"""


def add_replay(commands: Any, run_loop: Callable[[Awaitable[Any]], Any]) -> None:
    """`slotkeeper replay`: send them again, and count."""
    parser = commands.add_parser(
        "replay",
        help="send recorded sessions to a server and count what it computed",
        description=(
            "Send recorded requests and compare the prompt tokens that were computed, by the engine's\n"
            "own count, with what a perfect cache would have computed."
        ),
        epilog=(
            "Example: slotkeeper replay day.jsonl --base http://127.0.0.1:8081 --against http://127.0.0.1:8080\n"
            "Next:    slotkeeper lint day.jsonl, for what the clients themselves rewrite."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE.jsonl", help="also .jsonl.xz")
    parser.add_argument("--base", required=True, metavar="URL", help="where to send them")
    parser.add_argument("--against", metavar="URL", help="send them there too, and compare")
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="URL",
        help="an engine behind --base, whose own counter is read; else --base is asked to pass that on",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="cap of each reply (%(default)s)"
    )

    def run(args: argparse.Namespace) -> int:
        from slotkeeper.bench.replay import replay

        base = server(args.base, "--base")
        against = server(args.against, "--against") if args.against else None
        engines = [server(engine, "--engine") for engine in args.engine]
        played = replay(args.traces, base=base, against=against, max_tokens=args.max_tokens, engines=engines)
        return int(run_loop(played))

    parser.set_defaults(run=run)


def add_lint(commands: Any) -> None:
    """`slotkeeper lint`: say what they rewrite."""
    parser = commands.add_parser(
        "lint",
        help="what recorded agents rewrite in their own past, what that costs, and which rule puts it right",
        description=LINT,
        epilog=LINT_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE.jsonl", help="also .jsonl.xz")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of tables")

    def run(args: argparse.Namespace) -> int:
        from slotkeeper.bench.report import wide_console
        from slotkeeper.lint import lint

        return lint(args.traces, wide_console(), as_json=args.json)

    parser.set_defaults(run=run)
