"""Parsers of commands that ask a running sidecar (`why`, `top`, `drain`, `health`) or use recordings."""
# ruff: noqa: PLC0415 - each command imports what it needs, so that --help stays quick

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from slotkeeper.cli.arguments import ADMIN, ADMIN_CA, ADMIN_TOKEN, MOST_INT, between
from slotkeeper.values import server

# -- a running sidecar: `why`, `top`, `drain`, `health` --------------------------------------------------


MOST: Final = 500  # most requests that the admin port lists in one answer
LEAST_PAUSE: Final = 0.1  # seconds between two refreshes
MOST_PAUSE: Final = 3600.0

WHY: Final = """\
Explain what a request computed: where it was sent and which choices that beat, how long each
stage took, what its client had changed, which tokens were computed twice, and what to do about
it. Without an ID: list the last requests, one per line.
"""
WHY_EPILOG: Final = """\
Example: slotkeeper why
         slotkeeper why 4be1a0c2
         slotkeeper why --repeated --json | jq .cause
Next:    do what the answer advises; slotkeeper top shows the sidecar live
An ID is the X-Request-Id of an answer, or at least its last 4 letters; `last` is the newest.
Excerpts of prompts are shown only if the sidecar runs with --why-text.
"""


def add_why(commands: Any) -> None:
    parser = commands.add_parser(
        "why",
        help="why a request was computed again, and what to do about it",
        description=WHY,
        epilog=WHY_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "id", nargs="?", metavar="ID", help="which request (default: a list of the last ones)"
    )
    parser.add_argument(
        "--last",
        type=between(int, 1, MOST),
        default=20,
        metavar="N",
        help=f"how many to list, at most {MOST} (default: %(default)s)",
    )
    parser.add_argument("--repeated", action="store_true", help="list only those that computed tokens twice")
    parser.add_argument("--json", action="store_true", help="lines of JSON instead of tables and sentences")
    _where(parser)

    def run(args: argparse.Namespace) -> int:
        import asyncio

        from slotkeeper.cli.terminal import console
        from slotkeeper.cli.why import why

        return int(
            asyncio.run(
                why(
                    args.id,
                    console(),
                    admin=args.admin,
                    token=args.admin_token,
                    ca=args.admin_ca,
                    last=args.last,
                    repeated=args.repeated,
                    as_json=args.json,
                )
            )
        )

    parser.set_defaults(run=run)


def add_top(commands: Any) -> None:
    parser = commands.add_parser(
        "top",
        help="slots, conversations and the hit rate of a running sidecar, live",
        description="Show the contents of slots, hits, and computed tokens, until Ctrl-C is pressed.",
        epilog=(
            "Example: slotkeeper top --admin http://127.0.0.1:9090\n"
            "Next:    slotkeeper why ID, for a request that computed much."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--every",
        type=between(float, LEAST_PAUSE, MOST_PAUSE, "seconds"),
        default=1.0,
        metavar="SECONDS",
        help="time between two refreshes (default: %(default)s)",
    )
    parser.add_argument("--once", action="store_true", help="print once and exit")
    _where(parser)

    def run(args: argparse.Namespace) -> int:
        import asyncio

        from slotkeeper.cli.terminal import console
        from slotkeeper.cli.top import top

        work = top(
            console(),
            admin=args.admin,
            token=args.admin_token,
            ca=args.admin_ca,
            every=args.every,
            once=args.once,
        )
        return int(asyncio.run(work))

    parser.set_defaults(run=run)


def add_drain(commands: Any) -> None:
    """Add `slotkeeper drain` and `slotkeeper undrain`."""
    parser = commands.add_parser(
        "drain",
        help="send no new requests to an engine, and wait until it is idle",
        description=(
            "Take an engine out of use: it gets no new requests, running answers end, and what its slots\n"
            "hold is saved, so that its conversations continue elsewhere. `slotkeeper undrain` ends this."
        ),
        epilog="Example: slotkeeper drain cuda\nNext:    slotkeeper undrain cuda, once it is back",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("engine", metavar="NAME", help="its name, or its address")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until it is drained")
    _where(parser)

    def run(args: argparse.Namespace) -> int:
        import asyncio

        from slotkeeper.cli.admin_client import drain

        where = {"admin": args.admin, "token": args.admin_token, "ca": args.admin_ca}
        return int(asyncio.run(drain(args.engine, **where, wait=not args.no_wait)))

    parser.set_defaults(run=run)
    back = commands.add_parser(
        "undrain",
        help="use a drained engine again",
        description="Use an engine again that `slotkeeper drain` had taken out of use.",
        epilog="Example: slotkeeper undrain cuda\nNext:    slotkeeper top, to see its slots",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    back.add_argument("engine", metavar="NAME", help="its name, or its address")
    _where(back)

    def run_back(args: argparse.Namespace) -> int:
        import asyncio

        from slotkeeper.cli.admin_client import undrain

        where = {"admin": args.admin, "token": args.admin_token, "ca": args.admin_ca}
        return int(asyncio.run(undrain(args.engine, **where)))

    back.set_defaults(run=run_back)


def add_health(commands: Any) -> None:
    parser = commands.add_parser(
        "health",
        help="whether a running sidecar is ready; for container health checks",
        description="Ask a running sidecar whether it is ready. Exit code 0 if so, else 1.",
        epilog=(
            "Example: slotkeeper health --admin http://127.0.0.1:9090\n"
            "Next:    slotkeeper doctor --upstream URL, if no engine is up."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--live",
        action="store_true",
        help="only whether the process is alive, even if it drains or no engine is up",
    )
    parser.add_argument("--admin", metavar="URL", help=ADMIN)
    parser.add_argument("--admin-ca", type=Path, metavar="FILE.pem", help=ADMIN_CA)

    def run(args: argparse.Namespace) -> int:
        import asyncio

        from slotkeeper.cli.admin_client import health

        return int(asyncio.run(health(admin=args.admin, live=args.live, ca=args.admin_ca)))

    parser.set_defaults(run=run)


def _where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--admin", metavar="URL", help=ADMIN)
    parser.add_argument("--admin-token", metavar="TOKEN", help=ADMIN_TOKEN)
    parser.add_argument("--admin-ca", type=Path, metavar="FILE.pem", help=ADMIN_CA)


# -- recorded requests: `replay`, `lint` -----------------------------------------------------------------


LINT: Final = """\
Read recorded requests, and report where each diverges from the one before it: a date in the system prompt,
the git status, tools in another order, reasoning that was left out. An engine computes everything after such
a place again, although it is unchanged. No engine is needed. Tokens are estimated from characters.
"""
LINT_EPILOG: Final = """\
Example: slotkeeper lint day.jsonl
         slotkeeper lint *.jsonl.xz --json | jq '.findings[] | {client, cause, tokens_about, rule}'
Next:    slotkeeper serve --rules NAME=fix, with a rule that the report names
Exit code 0 when nothing was rewritten, 1 when something costs more than 200 tokens, 2 for wrong usage.
A line of a trace is one JSON object: t, client, session, path, headers, body.
"""


def add_replay(commands: Any, run_loop: Callable[[Awaitable[Any]], Any]) -> None:
    """Add `slotkeeper replay`: send recorded requests again and count tokens."""
    parser = commands.add_parser(
        "replay",
        help="send recorded sessions to a server and count what it computed",
        description=(
            "Send recorded requests and compare the prompt tokens that were computed, by the engine's\n"
            "own count, with what a perfect cache would have computed."
        ),
        epilog=(
            "Example: slotkeeper replay day.jsonl --base http://127.0.0.1:8081 --against http://127.0.0.1:8080\n"
            "Next:    slotkeeper lint day.jsonl, to see what the clients themselves rewrite."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE.jsonl", help="also .jsonl.xz")
    parser.add_argument("--base", required=True, metavar="URL", help="the server to send them to")
    parser.add_argument("--against", metavar="URL", help="a second server to send them to, for comparison")
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="URL",
        help="an engine behind --base whose own counter is read (default: the counter that --base passes on)",
    )
    parser.add_argument(
        "--max-tokens",
        type=between(int, 1, MOST_INT, "tokens"),
        default=64,
        metavar="N",
        help="cap of each reply (%(default)s)",
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
    """Add `slotkeeper lint`: report what recorded agents rewrite."""
    parser = commands.add_parser(
        "lint",
        help="what recorded agents rewrite in earlier messages, what that costs, and which rule fixes it",
        description=LINT,
        epilog=LINT_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE.jsonl", help="also .jsonl.xz")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of tables")
    parser.add_argument(
        "--context",
        type=between(int, 1, MOST_INT, "tokens"),
        metavar="TOKENS",
        help="context of a slot: the limit for restoring results that an agent has pruned (default: none)",
    )

    def run(args: argparse.Namespace) -> int:
        from slotkeeper.bench.measure import wide_console
        from slotkeeper.cli.lint import lint

        return lint(args.traces, wide_console(), as_json=args.json, context=args.context)

    parser.set_defaults(run=run)
