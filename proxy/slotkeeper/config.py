"""Where settings come from: flag > environment (`SLOTKEEPER_*`, secrets also `*_FILE`) > TOML > default."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource, TomlConfigSettingsSource

from slotkeeper.settings import PREFIX, SECRETS, Settings
from slotkeeper.units import in_words


class UsageError(Exception):
    """The settings are wrong; the message says which and what to do. Exit code 2."""


@dataclass(frozen=True, slots=True)
class Loaded:
    settings: Settings
    origins: Mapping[str, str]  # name -> flag, environment, file, default


def load(flags: Mapping[str, Any], config: Path | None = None) -> Loaded:
    """Merge all sources. Raises UsageError with one line for each thing that is wrong."""
    sources: list[tuple[str, Mapping[str, Any]]] = [("default", {})]
    try:
        if config is not None:
            if not config.is_file():
                raise UsageError(f"--config: there is no file {config}")
            sources.append((f"file {config}", TomlConfigSettingsSource(Settings, config)()))
        sources.append(
            ("environment", {**_secret_files(), **EnvSettingsSource(Settings, env_prefix=PREFIX)()})
        )
        sources.append(("flag", flags))
        merged: dict[str, Any] = {}
        origins = dict.fromkeys(Settings.model_fields, "default")
        for origin, values in sources:
            merged |= values
            origins |= dict.fromkeys(values, origin)
        return Loaded(Settings(**merged), origins)
    except ValidationError as error:
        raise UsageError("\n".join(_line(e) for e in error.errors())) from None
    except ValueError as error:  # TOML that does not parse
        raise UsageError(f"{config}: {error}") from None


def _secret_files() -> dict[str, str]:
    """Secrets by file, as containers mount them: SLOTKEEPER_ADMIN_TOKEN_FILE=/run/secrets/token."""
    found = {}
    for name in SECRETS:
        if path := os.environ.get(f"{PREFIX}{name.upper()}_FILE"):
            try:
                found[name] = Path(path).read_text("utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"{PREFIX}{name.upper()}_FILE: {path}: {error}") from None
    return found


def _line(error: Any) -> str:
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":  # only a file can name what is no flag
        return f"{name}: there is no such setting; --print-config lists them"
    flag = f"--{name.replace('_', '-')}: " if name else ""
    return f"{flag}{error['msg'].removeprefix('Value error, ')}"


def shown(loaded: Loaded) -> list[tuple[str, str, str]]:
    """(name, value, origin) of every setting, secrets hidden, for `--print-config`."""
    return [
        (name, in_words(getattr(loaded.settings, name)), loaded.origins[name])
        for name in Settings.model_fields
    ]
