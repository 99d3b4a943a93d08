"""Sources of the settings: flag > environment (`SLOTKEEPER_*`, secrets also `*_FILE`) > TOML > default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ByteSize, ValidationError
from pydantic_settings import EnvSettingsSource, TomlConfigSettingsSource

from slotkeeper.environment import PREFIX, check_names, secret_files
from slotkeeper.settings import Settings
from slotkeeper.values import PLAIN, UsageError, meant, removed


@dataclass(frozen=True, slots=True)
class Loaded:
    """The settings, and the source of each value."""

    settings: Settings
    origins: Mapping[str, str]  # name -> flag, environment, file PATH or default


def load(flags: Mapping[str, Any], config: Path | None = None) -> Loaded:
    """Merge all sources. Raises UsageError with one line for each error."""
    check_names(Settings.model_fields)
    sources: list[tuple[str, Mapping[str, Any]]] = [("default", {})]
    origins = dict.fromkeys(Settings.model_fields, "default")
    try:
        if config is not None:
            sources.append((f"file {config}", _file(config)))
        sources.append(
            ("environment", {**secret_files(), **EnvSettingsSource(Settings, env_prefix=PREFIX)()})
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


def _line(error: Any, origins: Mapping[str, str]) -> str:
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":  # only a file can name a setting that does not exist
        hint = removed(name) or meant(name.replace("-", "_").lower(), Settings.model_fields)
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


def shown(loaded: Loaded) -> list[tuple[str, str, str]]:
    """Return (name, value, origin) of every setting, with secrets hidden, for `--print-config`."""
    return [
        (name, in_words(getattr(loaded.settings, name)), loaded.origins[name])
        for name in Settings.model_fields
    ]


def in_words(value: Any) -> str:
    """Format a value as a person would write it in a setting; "" for None."""
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case ByteSize():
            return _size(value)
        case tuple():
            return ", ".join(value)
        case _:
            return str(value)


_UNITS: Final = {
    f"{prefix}{tail}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for tail, base in (("iB", 1024), ("B", 1000))
}


def _size(count: int) -> str:
    """Format bytes in the unit that gives the shortest exact text: it parses back to the same number."""
    exact = [f"{count // unit}{name}" for name, unit in _UNITS.items() if count and not count % unit]
    return min([*exact, str(count)], key=len)
