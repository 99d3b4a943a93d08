"""What a fleet of many engines would reuse, by the rule of its gateway: `python -m benchmarks.simulator`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from pydantic import ByteSize, TypeAdapter

from benchmarks.simulator.load import LoadProfile, Synthetic, from_files
from benchmarks.simulator.simulation import WAYS, Files, Simulation, shapes_of
from benchmarks.simulator.timed_engine import EngineRates
from slotkeeper.bench.measure import wide_console
from slotkeeper.bench.replay import LineError, TraceError
from slotkeeper.cli.arguments import MOST_SLOTS, between
from slotkeeper.cli.terminal import Column, Row, fitted, ratio, say, seconds, size
from slotkeeper.scheduler.slots.engine_model import Memory

MEMORIES: Final = tuple(memory.value for memory in Memory if memory is not Memory.UNKNOWN)
MOST_ENGINES: Final = 500
MOST: Final = 1_000_000  # conversations, turns, systems, requests
MOST_SEED: Final = 2**32 - 1
# Numbers for which simulated time stays exact to the millisecond, and prompts fit into memory.
LEAST_RATE: Final = 0.001
MOST_RATE: Final = 1e9
MOST_BYTES: Final = 2**60
MOST_TOKENS: Final = 2**20  # of a system prompt, a message or a reply

_count: Final = between(int, 1, MOST)
_rate: Final = between(float, LEAST_RATE, MOST_RATE)
_tokens: Final = between(int, 1, MOST_TOKENS, "tokens")

SIMULATE: Final = """\
Run Slotkeeper's own scheduler with many simulated engines, and report what a fleet would reuse, how long
clients would wait, and how many bytes would move. No engine or model is needed.

The load is recorded (`slotkeeper docs recording`, or a trace in Mooncake's format: JSON lines with timestamp,
input_length, output_length, hash_ids), or synthetic: agents with shared system prompts whose turns grow.
Without --way and --files, every gateway is tried, with a folder for each sidecar and with one shared store.
"""
SIMULATE_EPILOG: Final = """\
Example: python -m benchmarks.simulator --engines 1,4,16
         python -m benchmarks.simulator day.jsonl --engines 2 --slots 2 --prefill-rate 900
         python -m benchmarks.simulator conversation_trace.jsonl --requests 2000 --engines 8 --json
Next:    slotkeeper docs scaling: what the results mean, and how to run a fleet
Rates are those of one engine: `slotkeeper top` shows yours. The same arguments give the same figures.
"""
LEGEND: Final = """\
hit rate: reused / prompt tokens; large: hit rate of one large cache for all. waited: tokens that clients
waited for / the least that any cache could compute; total: with idle work. TTFT: time to first token. saved,
restored: bytes to and from slot folders; fetched: bytes from the shared store. busiest: requests of the
busiest sidecar / the mean.
"""
GATEWAY: Final = """how a sidecar is chosen: round-robin; consistent-hash of the conversation; cache-aware, \
SMG's rule; lmetric, new tokens times batch; or one-sidecar that has all engines (default: each of them)"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulator",
        description=SIMULATE,
        epilog=SIMULATE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE.jsonl", help="a recorded load")
    parser.add_argument(
        "--engines", type=_counts, default=(1, 4), metavar="N,...", help="numbers of engines (1,4)"
    )
    parser.add_argument("--way", action="append", choices=WAYS, help=GATEWAY)
    parser.add_argument(
        "--files", action="append", choices=tuple(map(str, Files)), help="snapshots (default: local, shared)"
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON for each fleet")
    engine = parser.add_argument_group("each engine")
    engine.add_argument(
        "--slots", type=between(int, 1, MOST_SLOTS), default=4, metavar="N", help="%(default)s"
    )
    engine.add_argument("--memory", choices=MEMORIES, default="dense", help="model's memory (%(default)s)")
    engine.add_argument("--prefill-rate", type=_rate, metavar="TOKENS", help="tokens per second (1500)")
    engine.add_argument("--decode-rate", type=_rate, metavar="TOKENS", help="per second and answer (40)")
    engine.add_argument(
        "--save-rate", type=_size, metavar="SIZE", help="bytes per second to its folder (1e9)"
    )
    engine.add_argument("--restore-rate", type=_size, metavar="SIZE", help="bytes per second from it (2e9)")
    engine.add_argument("--network-rate", type=_size, metavar="SIZE", help="to the shared store (1.25e9)")
    engine.add_argument("--token-bytes", type=_size, metavar="SIZE", help="of each token in a file (64KiB)")
    engine.add_argument(
        "--hot-bytes", type=_size, default=64 << 30, metavar="SIZE", help="of a folder (64GiB)"
    )
    engine.add_argument(
        "--store-bytes", type=_size, default=1 << 40, metavar="SIZE", help="of the store (1TiB)"
    )
    made = parser.add_argument_group("a synthetic load")
    made.add_argument("--conversations", type=_count, default=8, metavar="N", help="per engine (8)")
    made.add_argument("--turns", type=_count, default=8, metavar="N", help="of each one (%(default)s)")
    made.add_argument("--systems", type=_count, default=3, metavar="N", help="system prompts (%(default)s)")
    made.add_argument("--system-tokens", type=_tokens, default=4000, metavar="N", help="%(default)s")
    made.add_argument("--first-tokens", type=_tokens, default=1500, metavar="N", help="%(default)s")
    made.add_argument("--turn-tokens", type=_tokens, default=800, metavar="N", help="%(default)s")
    made.add_argument("--reply-tokens", type=_tokens, default=200, metavar="N", help="%(default)s")
    made.add_argument("--pause", type=_rate, default=8.0, metavar="SECONDS", help="between turns (8)")
    made.add_argument(
        "--within", type=_rate, default=120.0, metavar="SECONDS", help="until all have begun (120)"
    )
    made.add_argument("--seed", type=between(int, 0, MOST_SEED), default=1, help="%(default)s")
    parser.add_argument("--requests", type=_count, metavar="N", help="most requests of a Mooncake trace")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate the fleets that the arguments name. Returns the exit code."""
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        read = from_files(args.traces, most=args.requests) if args.traces else None
    except (TraceError, LineError) as error:
        parser.error(str(error))
    ways = tuple(args.way or WAYS)
    files = [Files(name) for name in args.files or (Files.LOCAL, Files.SHARED)]
    more = {
        "slots": args.slots,
        "memory": Memory(args.memory),
        "rates": _rates(args),
        "hot_bytes": args.hot_bytes,
        "store_bytes": args.store_bytes,
    }
    console, shown = wide_console(), []
    for count in args.engines:
        load = read or _made(args, count)
        if not args.json:
            console.print(f"{count} engines, {load.about}", highlight=False)
        for shape in shapes_of([count], ways, files, **more):
            shown.append(Simulation(load, shape).run().shown())
            if args.json:
                say(shown[-1])
    if not args.json:
        console.print(fitted(_columns(), shown, console.width))
        console.print(LEGEND, highlight=False)
    return 0


def _columns() -> list[Column]:
    """Return the table's columns. A narrow terminal keeps the ratios."""

    def waits(percent: int) -> Callable[[Row], str]:
        return lambda row: seconds(row[f"first_token_p{percent}"])

    def moved(name: str) -> Callable[[Row], str]:
        return lambda row: size(row[f"{name}_bytes"])

    return [
        Column("engines", lambda row: str(row["engines"])),
        Column("way", lambda row: row["way"], right=False),
        Column("files", lambda row: row["files"], right=False),
        Column("requests", lambda row: f"{row['requests']:,}", keep=2),
        Column("hit rate", lambda row: f"{row['hit_rate'] or 0:.3f}"),
        Column("large", lambda row: f"{row['large_cache']:.3f}", keep=5),
        Column("waited", lambda row: ratio(row["waited"])),
        Column("total", lambda row: ratio(row["total"]), keep=3),
        Column("TTFT p50", waits(50), keep=8),
        Column("p95", waits(95), keep=9),
        Column("p99", waits(99), keep=4),
        Column("saved", moved("saved"), keep=1),
        Column("restored", moved("restored"), keep=6),
        Column("fetched", moved("fetched"), keep=7),
        Column("busiest", lambda row: f"{row['busiest']:.2f}", keep=0),
    ]


def _made(args: argparse.Namespace, engines: int) -> LoadProfile:
    return Synthetic(
        conversations=args.conversations * engines,
        turns=args.turns,
        systems=args.systems,
        system_tokens=args.system_tokens,
        first_tokens=args.first_tokens,
        turn_tokens=args.turn_tokens,
        reply_tokens=args.reply_tokens,
        pause=args.pause,
        begin_within=args.within,
        seed=args.seed,
    ).load()


def _rates(args: argparse.Namespace) -> EngineRates:
    given = {
        "prefill": args.prefill_rate,
        "decode": args.decode_rate,
        "save": args.save_rate,
        "restore": args.restore_rate,
        "network": args.network_rate,
        "token_bytes": args.token_bytes,
    }
    return replace(EngineRates(), **{name: value for name, value in given.items() if value is not None})


def _counts(text: str) -> tuple[int, ...]:
    return tuple(between(int, 1, MOST_ENGINES, "engines")(part) for part in text.split(","))


def _bytes(text: str) -> float:
    """Read a size such as 1e9, 64KiB or 2GB. Raises ValueError."""
    try:
        return float(text)
    except ValueError:
        try:
            return TypeAdapter(ByteSize).validate_python(text)
        except OverflowError as error:
            raise ValueError from error


def _size(text: str) -> int:
    return int(between(_bytes, 1.0, float(MOST_BYTES), "bytes")(text))


if __name__ == "__main__":
    raise SystemExit(main())
