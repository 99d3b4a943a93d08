"""Flags for all settings, made from `Settings`; hints for misspelt words; the flags of `snapshots`."""
# ruff: noqa: PLC0415 - only `serve` and `up` have settings, and loading these takes long

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from slotkeeper.values import PLAIN, UsageError, meant, removed

if TYPE_CHECKING:
    from slotkeeper.settings import Loaded

N = TypeVar("N", int, float)

_KINDS: Final[Mapping[Any, str]] = {int: "int_parsing", float: "float_parsing"}  # -> what is wrong, in PLAIN
MOST_SLOTS: Final = 256  # of an engine (LLAMA_MAX_SEQ)
MOST_INT: Final = 2**31 - 1  # the engine reads numbers of tokens as int

FLAG: Final = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
ENGINE_WORDS: Final = "flags of llama-server go after --, as in: slotkeeper up --model model.gguf -- -ngl 99"


def command_in(words: Sequence[str]) -> str | None:
    return next((word for word in words if not word.startswith("-")), None)


def check_words(
    parser: argparse.ArgumentParser, commands: Mapping[str, argparse.ArgumentParser], words: Sequence[str]
) -> None:
    """Raise UsageError for the first word that is not a known command or flag."""
    command = command_in(words)
    if command is None:
        return
    if command not in commands:
        hint = meant(command, commands) or f"; the commands are {', '.join(commands)}"
        raise UsageError(f"{parser.prog}: there is no command {command!r}{hint}")
    at = words.index(command)
    _check_flags(parser, words[:at])
    _check_flags(commands[command], words[at + 1 :])


def _check_flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    known = ["--help", *FLAG.findall(parser.format_usage())]  # the usage names only -h
    for word in words:
        name = word.partition("=")[0]
        if not FLAG.fullmatch(name) or any(flag.startswith(name) for flag in known):
            continue  # a value, a flag, or the beginning of one
        hint = removed(name) or meant(name, known)
        if parser.prog.endswith(" up") and not hint:
            hint = f"; {ENGINE_WORDS}"
        all_ = "--help-all" if "--help-all" in known else "--help"
        hint = hint or f"; {parser.prog} {all_} lists all flags"
        raise UsageError(f"{parser.prog}: there is no {name}{hint}")


# -- settings as flags -----------------------------------------------------------------------------------

METAVARS: Final = {
    "upstream": "[NAME=]URL",
    "rules": "NAME=MODE[@CLIENT]",
    "listen": "HOST:PORT",
    "admin_listen": "HOST:PORT",
    "admin_host": "NAME",
    "namespaces": "auto|key|off",
    **dict.fromkeys(("otlp_endpoint", "hints"), "URL"),
    "trusted_proxies": "NETWORK",
    "max_connections": "N",
    "record": "DIR",
    **dict.fromkeys(("keys_file", "upstreams_file"), "FILE.toml"),
    "store_key_file": "FILE",
    **dict.fromkeys(("tls_cert", "tls_key"), "FILE.pem"),
    **dict.fromkeys(
        ("hot_bytes", "cold_bytes", "cold_store_bytes", "hourly_bytes", "max_body_bytes"), "SIZE"
    ),
    **dict.fromkeys(("save_timeout", "keep_alive", "drain_delay", "drain_timeout", "engine_wait"), "SECONDS"),
}
ADMIN: Final = "the sidecar's admin port (default: SLOTKEEPER_ADMIN_LISTEN, else http://127.0.0.1:9090)"
ADMIN_TOKEN: Final = "token of the admin port (default: SLOTKEEPER_ADMIN_TOKEN)"  # noqa: S105 - help
ADMIN_CA: Final = "trust this certificate of the admin port, or one that it signed"
SNAPSHOTS: Final = """\
List the snapshots of a sidecar, verify that their bytes are unchanged, or remove some.
The command asks a running sidecar on its admin port; while none runs, --slot-dir
reads the folder itself.
Exit code 1 if something is damaged or no sidecar answers.
"""
SNAPSHOTS_EPILOG: Final = """\
Example: slotkeeper snapshots ls
         slotkeeper snapshots verify 1a2b3c4d
         slotkeeper snapshots rm --all --admin http://127.0.0.1:9090
         slotkeeper snapshots ls --json --slot-dir /var/lib/slots | jq .tiers
Next:    slotkeeper why, to see which requests they served
An ID is one that `ls` shows, or at least its last 4 letters.
"""


def add_settings(parser: argparse.ArgumentParser, without: Sequence[str] = (), *, basics: bool) -> None:
    """Add a flag for every setting, or only for the basic ones, in groups as `--help` shows them.

    Only the flags that were given count (argparse.SUPPRESS).
    """
    from slotkeeper.settings import BASICS, GROUPS

    parser.add_argument("--config", type=Path, metavar="FILE.toml", help="read settings from a file")
    parser.add_argument(
        "--print-config", action="store_true", help="show every setting and its origin, then exit"
    )
    parser.add_argument("--help-all", action="help", help="show all settings, then exit")
    for title in [BASICS] if basics else GROUPS:
        group = parser.add_argument_group(title)
        for name in GROUPS[title]:
            if name not in without:
                _add_setting(group, name)


def _add_setting(group: Any, name: str) -> None:
    from slotkeeper.settings import Settings

    flag, dest, field = f"--{name.replace('_', '-')}", f"set_{name}", Settings.model_fields[name]
    if isinstance(field.default, bool):  # --evacuate and --no-evacuate
        kind: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    else:
        kind = {
            "action": "append" if isinstance(field.default, tuple) else "store",
            "metavar": METAVARS.get(name, name.rpartition("_")[2].upper()),
        }
    group.add_argument(flag, dest=dest, default=argparse.SUPPRESS, help=help_of(name), **kind)


def help_of(name: str) -> str:
    """Return a setting's description and its default."""
    from slotkeeper.settings import Settings, in_words

    field = Settings.model_fields[name]
    default = in_words(field.default)
    return f"{field.description}" + (f" (default: {default})" if default else "")


def settings_of(args: argparse.Namespace) -> Loaded:
    from slotkeeper.settings import load

    flags = {name[4:]: value for name, value in vars(args).items() if name.startswith("set_")}
    return load(flags, args.config)


def between(read: Callable[[str], N], least: N, most: N, unit: str = "") -> Callable[[str], N]:
    """Return a function for argparse that reads a number within bounds; it raises ArgumentTypeError.

    For a ValueError argparse would name the function.
    """

    def number(text: str) -> N:
        try:
            found = read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} {PLAIN[_KINDS.get(read, 'byte_size')]}") from None
        if not least <= found <= most:
            low = least if least < 1 else f"{least:.0f}"
            raise argparse.ArgumentTypeError(
                f"{text} is not between {low} and {most:.0f}{unit and ' '}{unit}"
            )
        return found

    return number


def print_config(loaded: Loaded, without: Sequence[str] = ()) -> int:
    """Print the settings in columns of plain text: a table would cut long paths at the terminal's width."""
    from slotkeeper.settings import shown

    rows = [("setting", "value", "from"), *(row for row in shown(loaded) if row[0] not in without)]
    names, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, value, origin in rows:
        print(f"{name:{names}}  {value:{values}}  {origin}")  # noqa: T201
    return 0


def add_snapshots(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=("ls", "verify", "rm"),
        help="ls: list them; verify: read them and move damaged ones to quarantine; rm: remove them",
    )
    parser.add_argument("ids", nargs="*", metavar="ID", help="which snapshots (default: all)")
    parser.add_argument("--all", action="store_true", help="all of them; `rm` needs this flag or an ID")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--admin", metavar="URL", help=ADMIN)
    where.add_argument(
        "--slot-dir", type=Path, metavar="DIR", help="read this slot folder itself, while no sidecar runs"
    )
    parser.add_argument("--cold-dir", type=Path, metavar="DIR", help="with --slot-dir: its second tier")
    parser.add_argument("--admin-token", metavar="TOKEN", help=ADMIN_TOKEN)
    parser.add_argument("--admin-ca", type=Path, metavar="FILE.pem", help=ADMIN_CA)
    parser.add_argument("--json", action="store_true", help="lines of JSON instead of tables and sentences")


def check_snapshots(args: argparse.Namespace) -> None:
    """Check what argparse cannot check. Raises UsageError."""
    if args.all and args.ids:
        raise UsageError("give IDs of snapshots or --all, not both")
    if args.action == "rm" and not (args.all or args.ids):
        raise UsageError("give the IDs of the snapshots to remove, or --all")
    if args.cold_dir and not args.slot_dir:
        raise UsageError("--cold-dir needs --slot-dir")
