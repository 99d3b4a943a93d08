"""The command line: one parser, one function for each command. Exit codes: 0, 1 failure, 2 usage."""
# ruff: noqa: PLC0415 - each command imports what it needs, so that --help stays quick

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Awaitable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from slotkeeper import __version__
from slotkeeper.cli.arguments import (
    ADMIN,
    ADMIN_CA,
    ADMIN_TOKEN,
    MOST_INT,
    MOST_SLOTS,
    SNAPSHOTS,
    SNAPSHOTS_EPILOG,
    add_settings,
    add_snapshots,
    between,
    check_snapshots,
    check_words,
    command_in,
    print_config,
    settings_of,
)
from slotkeeper.cli.completion import FILES, script
from slotkeeper.values import UsageError, server

EPILOG_OF_SERVE: Final = """\
Example: slotkeeper serve --upstream http://127.0.0.1:8081 --slot-dir /var/lib/slots
Next:    slotkeeper doctor --upstream http://127.0.0.1:8081, then point an agent at http://127.0.0.1:8080/v1

Every flag can also be a variable (SLOTKEEPER_LISTEN=...) or a line in the file of --config (listen = "...").
Flag beats variable beats file beats default; --print-config shows the result. --help-all shows all settings.
"""
EPILOG_OF_UP: Final = """\
Example: slotkeeper up --model model.gguf --slots 2 --context 65536 -- -ngl 99
Next:    point an agent at http://127.0.0.1:8080/v1, then see `slotkeeper why`
Arguments after -- go to llama-server and override the flags that `up` chooses.
"""
EPILOG_OF_DEMO: Final = """\
Example: slotkeeper demo --model tiny-dense
Next:    slotkeeper up --model model.gguf, with a model of your own
No model and no GPU are needed: a tiny model is built. The figures are the engine's own counts.
"""
EPILOG_OF_KEYS: Final = """\
Example: slotkeeper keys alice >> keys.toml
Next:    slotkeeper serve --keys-file keys.toml; a running sidecar reads the file again at SIGHUP
The key is shown once, on standard error; the file holds its SHA-256 and any limits that you add.
"""
EPILOG_OF_DOCTOR: Final = """\
Example: slotkeeper doctor --slot-dir /var/lib/slots --upstream http://127.0.0.1:8081
         slotkeeper doctor --measure --slot-dir /var/lib/slots --upstream http://127.0.0.1:8081
Next:    start llama-server with the flags that it names, then slotkeeper serve --upstream http://127.0.0.1:8081
"""
EPILOG_OF_DOCS: Final = """\
Example: slotkeeper docs agents
         slotkeeper docs agents | grep -n -A 30 '^## Codex'
Next:    slotkeeper docs quickstart, then slotkeeper doctor --upstream http://127.0.0.1:8081
On a terminal a page opens in the pager (the variable PAGER). Otherwise its Markdown is printed as it is.
"""
EPILOG_OF_COMPLETION: Final = """\
Example: slotkeeper completion fish > ~/.config/fish/completions/slotkeeper.fish
         eval "$(slotkeeper completion bash)"     in ~/.bashrc
         eval "$(slotkeeper completion zsh)"      in ~/.zshrc, after compinit
Next:    open another shell, and press Tab after slotkeeper
"""
OF_SIDECARS: Final = ("serve", "up")  # until they handle signals, SIGINT ends them at once: __main__.py
HELP: Final = frozenset({"-h", "--help"})  # show the basic settings only
STARTS_ENGINES: Final = ("up", "bench")
OF_UP: Final = ("upstream", "upstreams_file")  # `up` starts its engine itself


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and run the command. Returns the exit code."""
    _hold_standard_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    own, engine_words = _split(words)
    parser, commands = parsers()
    command, basics = command_in(own), False
    if command in OF_SIDECARS:  # for other commands, loading the settings takes longer than all else
        basics = not HELP.isdisjoint(own)
        add_all_settings(command, commands[command], basics=basics)
    try:
        check_words(parser, commands, own if not basics else ())
    except UsageError as error:
        parser.exit(2, f"{error}\n")
    args = parser.parse_args(own)
    if args.command not in OF_SIDECARS and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    args.engine_words = engine_words
    if not hasattr(args, "run"):
        parser.print_help()
        return 2
    if engine_words and args.command not in STARTS_ENGINES:
        parser.error("arguments after -- are for `slotkeeper up` and `bench --model`, which start the engine")
    try:
        return int(args.run(args))
    except UsageError as error:
        from slotkeeper.observe.standard_error import complain

        complain(args.command, error)
        return 2
    except KeyboardInterrupt:
        return 130


def run_loop(work: Awaitable[Any]) -> Any:
    """Run like asyncio.run, on uvloop if it is installed: 40 % more requests per second."""

    async def body() -> Any:
        return await work

    import asyncio

    try:
        import uvloop
    except ImportError:
        return asyncio.run(body())
    return uvloop.run(body())


def _hold_standard_streams() -> None:
    """Open the null device for standard streams that were closed, so that no socket gets their descriptors.

    For standard error it is opened for reading only, so that writes fail and are counted as dropped.
    """
    for name in ("stdin", "stdout", "stderr"):  # in the order of descriptors: open() takes the lowest free
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_WRONLY if name == "stdout" else os.O_RDONLY)
            setattr(sys, name, open(number, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115, PTH123


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    if "--" in words:
        at = words.index("--")
        return words[:at], words[at + 1 :]
    return words, []


def add_all_settings(command: str, parser: argparse.ArgumentParser, *, basics: bool = False) -> None:
    """Add the flags of the settings that one of OF_SIDECARS has; `basics`: only the basic ones."""
    add_settings(parser, without=OF_UP if command == "up" else (), basics=basics)


def parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser, and the parser of each command by name, without the flags of settings."""
    parser = argparse.ArgumentParser(
        prog="slotkeeper",
        description="A sidecar in front of stock llama-server: no token is prefilled twice.",
        epilog=(
            "Example: slotkeeper demo\n"
            "Next:    slotkeeper up --model model.gguf, or slotkeeper COMMAND --help"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"slotkeeper {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _serve(commands)
    _up(commands)
    _demo(commands)
    _bench(commands)
    _doctor(commands)
    _snapshots(commands)
    _keys(commands)
    _why(commands)
    _top(commands)
    _health(commands)
    _drain(commands)
    _replay(commands)
    _lint(commands)
    _docs(commands)
    _completion(commands)
    return parser, dict(commands.choices)


# -- commands ------------------------------------------------------------------------------------------


def _serve(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="run the sidecar in front of one or more llama-servers",
        description="Run the sidecar in front of one or more running llama-servers.",
        epilog=EPILOG_OF_SERVE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def run(args: argparse.Namespace) -> int:
        from slotkeeper.app import ListenError, serve
        from slotkeeper.cli.starting import (
            WrongUpstreamError,
            check_engines,
            check_loops,
            found,
            greeter,
            moved,
            patience_of,
            try_files,
            try_folders,
        )
        from slotkeeper.observe.log import configure
        from slotkeeper.observe.standard_error import complain

        loaded = settings_of(args)
        if args.print_config:
            return print_config(loaded)
        configure(loaded.settings.log_level, "auto")
        try_folders(loaded.settings)
        try_files(loaded.settings)
        if not loaded.settings.searches:
            check_loops(loaded.settings)

        async def work() -> None:
            given = await found(loaded.settings)
            await check_engines(given)
            search = partial(moved, given) if loaded.settings.searches else None
            await serve(given, listening=greeter(given), waiting=patience_of(given), search=search)

        try:
            run_loop(work())
        except WrongUpstreamError as error:
            complain("serve", str(error))
            return 1
        except ListenError as error:
            raise UsageError(str(error)) from None
        return 0

    parser.set_defaults(run=run)


def _up(commands: Any) -> None:
    parser = commands.add_parser(
        "up",
        help="start a llama-server with the right flags, and run the sidecar in front of it",
        description=(
            "Start a llama-server with the flags that let its cache work, restart it if it ends, and run\n"
            "the sidecar in front of it. Without --model a tiny model is built, to try things out."
        ),
        epilog=EPILOG_OF_UP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, metavar="FILE.gguf", help="the model (default: a tiny one)")
    parser.add_argument(
        "--engine",
        metavar="PATH",
        help="the llama-server to run, or a folder with a version of xllamacpp "
        "(default: the one on PATH, else an installed one of extra `engine`)",
    )
    parser.add_argument(
        "--slots",
        type=between(int, 1, MOST_SLOTS),
        metavar="N",
        help="conversations kept at once (default: 2)",
    )
    parser.add_argument(
        "--context",
        type=between(int, 1, MOST_INT, "tokens"),
        metavar="TOKENS",
        help="context of each slot (default: 32768, or the model's)",
    )

    def run(args: argparse.Namespace) -> int:
        from slotkeeper.cli.starting import try_files, try_folders
        from slotkeeper.cli.up import up
        from slotkeeper.observe.log import configure

        loaded = settings_of(args)
        if args.print_config:
            return print_config(loaded, without=OF_UP)
        configure(loaded.settings.log_level, "auto")
        try_folders(loaded.settings)
        try_files(loaded.settings)
        code: int = up(
            loaded.settings,
            model=args.model,
            engine=args.engine,
            slots=args.slots,
            context_tokens=args.context,
            extra=args.engine_words,
            run_loop=run_loop,
        )
        return code

    parser.set_defaults(run=run)


def _demo(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="see it work: a tiny model, a real engine, an agent's session with and without the sidecar",
        description="Send one session of two agents to a stock engine, directly and through the sidecar.",
        epilog=EPILOG_OF_DEMO,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--engine", metavar="PATH", help="the llama-server to run, or a folder with a version of xllamacpp"
    )
    parser.add_argument("--model", default="tiny-hybrid", help="which tiny model (default: %(default)s)")

    def run(args: argparse.Namespace) -> int:
        from slotkeeper.bench.demo import demo
        from slotkeeper.engine.child.launch import NoEngineError, find_engine
        from slotkeeper.observe.log import configure

        if args.engine:
            try:
                find_engine(args.engine).known  # noqa: B018 - runs it with --help
            except NoEngineError as error:
                raise UsageError(f"--engine: {error}") from None
        configure("error", "console")
        return int(run_loop(demo(engine=args.engine, model=args.model)))

    parser.set_defaults(run=run)


BENCH: Final = """\
Play the same work of two agents on your own engine: with stock flags, with the best flags known, and through
Slotkeeper, in turn until the time is over. Nothing leaves this machine, and the report holds no prompts.
"""
BENCH_EPILOG: Final = """\
Example: slotkeeper bench --model model.gguf -- -ngl 99
         slotkeeper bench --upstream http://127.0.0.1:8080 --slot-dir /var/cache/slots
         slotkeeper bench --model model.gguf --rival hearth-llm
         slotkeeper bench --model model.gguf --rival 'mine=./proxy.sh {upstream} {port} {slot_dir}'
         slotkeeper bench --compare monday.json tuesday.json
Next:    open slotkeeper-bench.html, or paste the Markdown beside it
A rival is another proxy between the clients and an engine with the best flags. Its command names {upstream}
(the engine's URL) and {port} (of 127.0.0.1, to listen on), and may name {slots} and {slot_dir} (the engine's
--slot-save-path). Known by name, once installed as `slotkeeper docs benchmarks` says: hearth-llm, proxycache.
Exit code 1 if a request failed, except through a rival, or the figures are impossible. Ctrl-C keeps the whole
rounds so far, and of the first one the ways that have ended.
"""


def _bench(commands: Any) -> None:
    """Add `slotkeeper bench`: stock beside Slotkeeper on the user's own engine."""
    parser = commands.add_parser(
        "bench",
        help="measure your own engine with and without the sidecar, and write a report",
        description=BENCH,
        epilog=BENCH_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _bench_flags(parser)

    def run(args: argparse.Namespace) -> int:
        from slotkeeper.cli.bench import compare, measure

        if args.compare:
            return compare(*args.compare)
        upstream = server(args.upstream, "--upstream") if args.upstream else None
        return measure(
            model=args.model,
            upstream=upstream,
            engine=args.engine,
            slot_dir=args.slot_dir,
            more=args.engine_words,
            rivals=args.rival,
            minutes=args.minutes,
            report=args.report,
            run_loop=run_loop,
        )

    parser.set_defaults(run=run)


def _bench_flags(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--model", type=Path, metavar="FILE.gguf", help="start engines on this model; their flags follow --"
    )
    source.add_argument(
        "--upstream", metavar="URL", help="a running llama-server, which nobody else uses meanwhile"
    )
    source.add_argument(
        "--compare", nargs=2, type=Path, metavar=("A.json", "B.json"), help="compare two reports"
    )
    parser.add_argument(
        "--slot-dir", type=Path, metavar="DIR", help="the --slot-save-path of the running llama-server"
    )
    parser.add_argument(
        "--engine",
        metavar="PATH",
        help="the llama-server for --model (default: the one on PATH, else installed)",
    )
    parser.add_argument(
        "--rival",
        action="append",
        default=[],
        metavar="NAME[=COMMAND]",
        help="another proxy that plays the same work; may be repeated",
    )
    parser.add_argument(
        "--minutes",
        type=between(float, 0.0, 24 * 60.0, "minutes"),
        default=10.0,
        metavar="N",
        help="how long, at least one round (default: %(default)g)",
    )
    parser.add_argument(
        "--report",
        type=Path,
        default=Path("slotkeeper-bench"),
        metavar="NAME",
        help="files to write: NAME with the endings json, md and html (default: %(default)s)",
    )


def _doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="report what an engine can and cannot do, and which flags to change",
        description="Examine a running llama-server. Exit code 1 if something makes the sidecar useless.",
        epilog=EPILOG_OF_DOCTOR,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--upstream", metavar="URL", help="the llama-server to examine; auto: the one of this machine"
    )
    which.add_argument(
        "--compare",
        nargs=2,
        metavar="URL",
        help=(
            "two llama-servers: whether each can continue from the other's snapshots "
            "(`slotkeeper docs engines`)"
        ),
    )
    parser.add_argument("--engine-api-key", metavar="KEY", help="its --api-key, if it has one")
    parser.add_argument(
        "--slot-dir",
        type=Path,
        metavar="DIR",
        help=(
            "its --slot-save-path, to try out snapshots as well: an idle slot is saved, an unused engine "
            "computes a few tokens, and the folder's speed is measured; only the data that tells this "
            "engine from others stays there"
        ),
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help=(
            "also measure how fast the engine is: 2,500 tokens of prefill at growing depth, a short answer, "
            "and with --slot-dir some saves and restores; it needs an idle engine with an empty slot, erases "
            "that slot in the end, and gives up if a request arrives"
        ),
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help=(
            "with --measure: print the speed as JSON, a profile for the simulator "
            "(`slotkeeper docs benchmarks`), and all else on standard error"
        ),
    )
    parser.set_defaults(run=partial(_examine, parser))


def _examine(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    from rich.console import Console

    from slotkeeper.addresses import AUTO
    from slotkeeper.cli.doctor import compare, doctor
    from slotkeeper.cli.measuring import printed

    if (args.compare and args.measure) or (args.json and not args.measure):
        parser.error("--measure examines one --upstream, and --json prints what --measure found")
    if args.compare:
        urls = [server(url, "--compare") for url in args.compare]
        return int(run_loop(compare(urls, args.engine_api_key, Console())))
    return int(
        run_loop(
            doctor(
                AUTO if args.upstream == AUTO else server(args.upstream, "--upstream"),
                args.engine_api_key,
                Console(stderr=args.json),
                args.slot_dir,
                printed(as_json=args.json) if args.measure else None,
            )
        )
    )


def _snapshots(commands: Any) -> None:
    parser = commands.add_parser(
        "snapshots",
        help="list, verify and remove the snapshots of slots",
        description=SNAPSHOTS,
        epilog=SNAPSHOTS_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_snapshots(parser)

    def run(args: argparse.Namespace) -> int:
        from rich.console import Console

        from slotkeeper.cli.snapshots import folder, running, snapshots

        check_snapshots(args)
        hot = args.slot_dir
        opening = folder(hot, args.cold_dir) if hot else running(args.admin, args.admin_token, args.admin_ca)
        return int(run_loop(snapshots(args.action, args.ids, opening, Console(), as_json=args.json)))

    parser.set_defaults(run=run)


def _keys(commands: Any) -> None:
    parser = commands.add_parser(
        "keys",
        help="make a key for a client, for the list of --keys-file",
        description="Make a key for a client. Prints its table for --keys-file, and the key itself.",
        epilog=EPILOG_OF_KEYS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="the client's name, such as alice")

    def run(args: argparse.Namespace) -> int:
        from slotkeeper.exchange.keys import new_key

        try:
            key, table = new_key(args.name)
        except ValueError as error:
            raise UsageError(str(error)) from None
        print(table)  # noqa: T201
        print(f"the key of {args.name}, shown only now: {key}", file=sys.stderr)  # noqa: T201
        return 0

    parser.set_defaults(run=run)


def _docs(commands: Any) -> None:
    parser = commands.add_parser(
        "docs",
        help="read the documents: settings for agents, troubleshooting, reference",
        description="Show a page of this version's documents. Without TOPIC: list the topics.",
        epilog=EPILOG_OF_DOCS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "topic", nargs="?", metavar="TOPIC", help="which page (default: a list of all topics)"
    )

    def run(args: argparse.Namespace) -> int:
        from slotkeeper.cli.docs import docs
        from slotkeeper.cli.terminal import console

        return docs(args.topic, console())

    parser.set_defaults(run=run)


def _completion(commands: Any) -> None:
    parser = commands.add_parser(
        "completion",
        help="print the script with which a shell completes commands and flags",
        description="Print the script with which a shell completes commands, flags, files and topics.",
        epilog=EPILOG_OF_COMPLETION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=tuple(FILES), help="which shell")

    def run(args: argparse.Namespace) -> int:
        print(script(args.shell), end="")  # noqa: T201
        return 0

    parser.set_defaults(run=run)


# -- a running sidecar: `why`, `top`, `drain`, `health` --------------------------------------------------

MAX_LISTED: Final = 500  # most requests that the admin port lists in one answer
MIN_REFRESH_SECONDS: Final = 0.1  # seconds between two refreshes
MAX_REFRESH_SECONDS: Final = 3600.0

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


def _why(commands: Any) -> None:
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
        type=between(int, 1, MAX_LISTED),
        default=20,
        metavar="N",
        help=f"how many to list, at most {MAX_LISTED} (default: %(default)s)",
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


def _top(commands: Any) -> None:
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
        type=between(float, MIN_REFRESH_SECONDS, MAX_REFRESH_SECONDS, "seconds"),
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


def _drain(commands: Any) -> None:
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


def _health(commands: Any) -> None:
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


def _replay(commands: Any) -> None:
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


def _lint(commands: Any) -> None:
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


if __name__ == "__main__":
    sys.exit(main())
