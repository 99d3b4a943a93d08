"""Commands and flags that do not exist, said before argparse does: with what was probably meant."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Final

from slotkeeper.config import UsageError
from slotkeeper.units import meant

FLAG: Final = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
ENGINE_WORDS: Final = "flags of llama-server go after --, as in: slotkeeper up --model model.gguf -- -ngl 99"


def check_words(
    parser: argparse.ArgumentParser, commands: Mapping[str, argparse.ArgumentParser], words: Sequence[str]
) -> None:
    """Raises UsageError for the first command or flag that there is not."""
    command = next((word for word in words if not word.startswith("-")), None)
    if command is None:
        return
    if command not in commands:
        hint = meant(command, commands) or f"; the commands are {', '.join(commands)}"
        raise UsageError(f"{parser.prog}: there is no command {command!r}{hint}")
    at = words.index(command)
    _check_flags(parser, words[:at])
    _check_flags(commands[command], words[at + 1 :])


def _check_flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    known = ["--help", *FLAG.findall(parser.format_usage())]  # the usage names it -h alone
    for word in words:
        name = word.partition("=")[0]
        if not FLAG.fullmatch(name) or any(flag.startswith(name) for flag in known):
            continue  # a value, a flag, or the beginning of one
        hint = meant(name, known)
        if parser.prog.endswith(" up") and not hint:
            hint = f"; {ENGINE_WORDS}"
        hint = hint or f"; {parser.prog} --help lists what there is"
        raise UsageError(f"{parser.prog}: there is no {name}{hint}")
