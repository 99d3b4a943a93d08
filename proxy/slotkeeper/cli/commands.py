"""Parsers of commands that ask a running sidecar (`why`, `top`, `health`) or read recordings."""
# ruff: noqa: PLC0415 - each command imports what it needs, so that --help stays quick

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import httpx

from slotkeeper.cli.admin_client import admin_port, strange
from slotkeeper.cli.arguments import ADMIN, ADMIN_CA, ADMIN_TOKEN
from slotkeeper.cli.terminal import complain
from slotkeeper.config import server

ADVICE: Final = "`slotkeeper doctor --upstream URL` looks at one."


async def health(*, admin: str | None, live: bool, ca: Path | None = None) -> int:
    """0 if it is, 1 with a sentence on standard error if not. Probes need no token."""
    async with admin_port(admin, None, ca=ca) as port:
        try:
            answer = await port.client.get("/livez" if live else "/readyz")
        except httpx.HTTPError as error:
            return _no(str(port.unreached(error)))
    if not answer.headers.get("Content-Type", "").startswith("text/plain"):
        return _no(str(strange(answer)))
    if answer.is_success:
        return 0
    said = answer.text.strip()
    return _no(f"{said}. {ADVICE}" if said.startswith("no engine") else said)


def _no(why: str) -> int:
    complain("health", why)
    return 1


# -- a running sidecar: `why`, `top`, `health` -----------------------------------------------------------


MOST: Final = 500  # requests that the admin port lists at once
LEAST_PAUSE: Final = 0.1  # seconds between two looks
MOST_PAUSE: Final = 3600.0

WHY: Final = """\
Say why a request computed what it computed: where it went and what that beat, how long each
stage took, what its client had changed, which tokens were computed twice, and what to do about
it. Without an ID: the last requests, one a line.
"""
WHY_EPILOG: Final = """\
Example: slotkeeper why
         slotkeeper why 4be1a0c2
         slotkeeper why --repeated --json | jq .cause
Next:    what to do about it stands in the answer; slotkeeper top shows the rest live
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
        type=_few,
        default=20,
        metavar="N",
        help=f"how many to list, at most {MOST} (default: %(default)s)",
    )
    parser.add_argument("--repeated", action="store_true", help="list only those that computed tokens twice")
    parser.add_argument("--json", action="store_true", help="lines of JSON instead of tables and sentences")
    _where(parser)

    def run(args: argparse.Namespace) -> int:
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
        description="Show what slots hold, what hits, and what is computed, until Ctrl-C is pressed.",
        epilog=(
            "Example: slotkeeper top --admin http://127.0.0.1:9090\n"
            "Next:    slotkeeper why ID, for a request that computed much."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--every",
        type=_pause,
        default=1.0,
        metavar="SECONDS",
        help="between two looks (default: %(default)s)",
    )
    parser.add_argument("--once", action="store_true", help="print it once and end")
    _where(parser)

    def run(args: argparse.Namespace) -> int:
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
    """`slotkeeper drain` and `slotkeeper undrain`."""
    parser = commands.add_parser(
        "drain",
        help="let nothing new begin on an engine, and wait until it is at rest",
        description=(
            "Take an engine out of use: nothing new begins there, running answers end, what its slots hold\n"
            "is saved, so that its conversations go on elsewhere. It stays so until `slotkeeper undrain`."
        ),
        epilog="Example: slotkeeper drain cuda\nNext:    slotkeeper undrain cuda, once it is back",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("engine", metavar="NAME", help="its name, or its address")
    parser.add_argument("--no-wait", action="store_true", help="only ask for it")
    _where(parser)

    def run(args: argparse.Namespace) -> int:
        from slotkeeper.cli.drain import drain

        where = {"admin": args.admin, "token": args.admin_token, "ca": args.admin_ca}
        return int(asyncio.run(drain(args.engine, **where, wait=not args.no_wait)))

    parser.set_defaults(run=run)
    back = commands.add_parser(
        "undrain",
        help="use an engine again that was drained",
        description="Use an engine again that `slotkeeper drain` had taken out of use.",
        epilog="Example: slotkeeper undrain cuda\nNext:    slotkeeper top, to see it at work",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    back.add_argument("engine", metavar="NAME", help="its name, or its address")
    _where(back)

    def run_back(args: argparse.Namespace) -> int:
        from slotkeeper.cli.drain import undrain

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
            "Next:    slotkeeper doctor --upstream URL, where no engine is up."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--live", action="store_true", help="only whether it lives, whatever its engines and its draining do"
    )
    parser.add_argument("--admin", metavar="URL", help=ADMIN)
    parser.add_argument("--admin-ca", type=Path, metavar="FILE.pem", help=ADMIN_CA)

    def run(args: argparse.Namespace) -> int:

        return int(asyncio.run(health(admin=args.admin, live=args.live, ca=args.admin_ca)))

    parser.set_defaults(run=run)


def _few(text: str) -> int:
    number = int(text)
    if not 1 <= number <= MOST:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and {MOST}")
    return number


def _pause(text: str) -> float:
    seconds = float(text)
    if not LEAST_PAUSE <= seconds <= MOST_PAUSE:
        raise argparse.ArgumentTypeError(f"{text} is not between {LEAST_PAUSE} and {MOST_PAUSE:.0f} seconds")
    return seconds


def _where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--admin", metavar="URL", help=ADMIN)
    parser.add_argument("--admin-token", metavar="TOKEN", help=ADMIN_TOKEN)
    parser.add_argument("--admin-ca", type=Path, metavar="FILE.pem", help=ADMIN_CA)


# -- recorded requests: `replay`, `lint` -----------------------------------------------------------------


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
    parser.add_argument(
        "--context",
        type=int,
        metavar="TOKENS",
        help="of a slot: how much room there is for results that an agent has pruned (default: enough)",
    )

    def run(args: argparse.Namespace) -> int:
        from slotkeeper.bench.measure import wide_console
        from slotkeeper.cli.lint import lint

        return lint(args.traces, wide_console(), as_json=args.json, context=args.context)

    parser.set_defaults(run=run)
