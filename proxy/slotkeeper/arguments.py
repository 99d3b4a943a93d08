"""Settings as flags: one for each, made from the same table as variables and file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from slotkeeper.config import Loaded, Settings, load, shown

METAVARS: Final = {"upstream": "URL", "listen": "HOST:PORT", "admin_listen": "HOST:PORT"}


def add_settings(parser: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    """A flag for every setting; only those that were given count (argparse.SUPPRESS)."""
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help="read settings from a file")
    parser.add_argument(
        "--print-config", action="store_true", help="show every setting and its origin, then exit"
    )
    for name, field in Settings.model_fields.items():
        if name in without:
            continue
        default = ", ".join(field.default) if isinstance(field.default, tuple) else field.default
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            dest=f"set_{name}",
            action="append" if name == "upstream" else "store",
            default=argparse.SUPPRESS,
            metavar=METAVARS.get(name, name.rpartition("_")[2].upper()),
            help=f"{field.description}" + (f" (default: {default})" if default not in {None, ""} else ""),
        )


def settings_of(args: argparse.Namespace) -> Loaded:
    flags = {name[4:]: value for name, value in vars(args).items() if name.startswith("set_")}
    return load(flags, args.config)


def positive(text: str) -> int:
    number = int(text)
    if number <= 0:
        raise ValueError(text)
    return number


def print_config(loaded: Loaded, without: Sequence[str] = ()) -> int:
    """As columns of plain text: a table would cut long paths where the terminal ends."""
    rows = [("setting", "value", "from"), *(row for row in shown(loaded) if row[0] not in without)]
    names, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, value, origin in rows:
        print(f"{name:{names}}  {value:{values}}  {origin}")  # noqa: T201
    return 0
