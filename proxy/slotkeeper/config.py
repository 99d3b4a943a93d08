"""Sources of the settings: flag > environment (`SLOTKEEPER_*`, secrets also `*_FILE`) > TOML > default."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource, TomlConfigSettingsSource

from slotkeeper.settings import PREFIX, SECRETS, Settings
from slotkeeper.values import base_of, in_words, meant, nearest

OTHERS: Final = frozenset({f"{PREFIX}ENGINE_PARENT"})  # set for an engine that we start (engine/xllama.py)
# Kubernetes sets variables of these names for each Service.
_LINK: Final = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_|$)|_PORT(_\d+_(TCP|UDP|SCTP).*)?$")

# pydantic's error type -> what is wrong and what to write instead; the value precedes this text.
PLAIN: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("byte_size", "byte_size_unit"),
        "is not a size; write it as a number of bytes, or as in 32GiB or 500MB",
    ),
    **dict.fromkeys(("float_parsing", "float_type"), "is not a number; write it as in 2.5"),
    **dict.fromkeys(
        ("int_parsing", "int_type", "int_from_float"), "is not a whole number; write it as in 500"
    ),
    **dict.fromkeys(("bool_parsing", "bool_type"), "is neither true nor false"),
}


class UsageError(Exception):
    """A setting is wrong; the message says which one and what to do. Exit code 2."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The settings, and the source of each value."""

    settings: Settings
    origins: Mapping[str, str]  # name -> flag, environment, file PATH or default


def load(flags: Mapping[str, Any], config: Path | None = None) -> Loaded:
    """Merge all sources. Raises UsageError with one line for each error."""
    _check_names(os.environ, Settings.model_fields)
    sources: list[tuple[str, Mapping[str, Any]]] = [("default", {})]
    origins = dict.fromkeys(Settings.model_fields, "default")
    try:
        if config is not None:
            sources.append((f"file {config}", _file(config)))
        sources.append(
            ("environment", {**_secret_files(), **EnvSettingsSource(Settings, env_prefix=PREFIX)()})
        )
        sources.append(("flag", flags))
        merged: dict[str, Any] = {}
        for origin, values in sources:
            merged |= values
            origins |= dict.fromkeys(values, origin)
        return Loaded(Settings(**merged), origins)
    except ValidationError as error:
        raise UsageError("\n".join(_line(e, origins) for e in error.errors())) from None
    except ValueError as error:  # TOML that does not parse
        raise UsageError(f"{config}: {error}") from None


def _file(path: Path) -> Mapping[str, Any]:
    """Return the settings in a TOML file. Raises ValueError if it is not TOML, UsageError if unreadable."""
    try:
        if not path.is_file():
            raise UsageError(f"--config: there is no file {path}")
        return TomlConfigSettingsSource(Settings, path)()
    except OSError as error:
        raise UsageError(
            f"--config: {path}: {error.strerror or error}; give a file that this user can read"
        ) from None


def from_environment(*names: str) -> dict[str, Any]:
    """Return some settings as the environment has them, for commands that need only these.

    The other variables are not checked. Raises UsageError for a misspelt variable or an unreadable file.
    """
    _check_names(os.environ, names)
    found = {**_secret_files(names), **EnvSettingsSource(Settings, env_prefix=PREFIX)()}
    return {name: value for name, value in found.items() if name in names}


def _secret_files(names: Collection[str] = SECRETS) -> dict[str, str]:
    """Read the secrets that files hold, as containers mount them.

    For example, SLOTKEEPER_ADMIN_TOKEN_FILE=/run/secrets/token. Raises UsageError for an unreadable file.
    """
    secrets = {}
    for name in SECRETS:
        if name in names and (path := os.environ.get(f"{PREFIX}{name.upper()}_FILE")):
            try:
                secrets[name] = Path(path).read_text("utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"{PREFIX}{name.upper()}_FILE: {path}: {error}") from None
    return secrets


def _check_names(environ: Mapping[str, str], names: Collection[str]) -> None:
    """Raise UsageError for a misspelt variable of these settings, which would be ignored silently otherwise.

    Names that resemble no setting are ignored: they may belong to another program, such as Kubernetes.
    """
    known = {name.upper(): name for name in Settings.model_fields}  # without the prefix -> setting
    known |= {f"{name.upper()}_FILE": name for name in SECRETS}
    for name in environ:
        word = name.removeprefix(PREFIX)
        if word == name or word in known or name in OTHERS or _LINK.search(name):
            continue
        probably = nearest(word, known)
        if probably and known[probably] in names:
            raise UsageError(f"{name}: there is no such variable; did you mean {PREFIX}{probably}?")


def _line(error: Any, origins: Mapping[str, str]) -> str:
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":  # only a file can name a setting that does not exist
        hint = meant(name.replace("-", "_").lower(), Settings.model_fields)
        return f"{_named(name, origins)}: there is no such setting{hint or '; --print-config lists them'}"
    problem = PLAIN.get(error["type"], error["msg"].removeprefix("Value error, "))
    if error["type"] in PLAIN:
        problem = f"{error['input']!r} {problem}"
    return f"{_named(error['loc'][0], origins)}: {problem}" if name else problem


def _named(setting: str, origins: Mapping[str, str]) -> str:
    """Return the name of a setting in the source of its value: a variable, a file's key or a flag."""
    origin = origins.get(setting, "")
    if origin == "environment":
        return f"{PREFIX}{setting.upper()}"
    if origin.startswith("file "):
        return f"{origin.removeprefix('file ')}: {setting}"
    return f"--{setting.replace('_', '-')}"


def server(text: str, flag: str) -> str:
    """Normalise a server's URL, given with or without /v1. Raises UsageError."""
    try:
        return base_of(text)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None


def shown(loaded: Loaded) -> list[tuple[str, str, str]]:
    """Return (name, value, origin) of every setting, with secrets hidden, for `--print-config`."""
    return [
        (name, in_words(getattr(loaded.settings, name)), loaded.origins[name])
        for name in Settings.model_fields
    ]
