"""The commands that look at a running sidecar: `why`, `top` and `health`."""
# ruff: noqa: PLC0415 - each command imports what it needs, so that --help stays quick

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any, Final

from slotkeeper.arguments import ADMIN, ADMIN_CA, ADMIN_TOKEN

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
        from slotkeeper.terminal.out import console
        from slotkeeper.why import why

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
        from slotkeeper.terminal.out import console
        from slotkeeper.top import top

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
        from slotkeeper.health import health

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
