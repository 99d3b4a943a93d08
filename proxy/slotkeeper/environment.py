"""The variables of a sidecar, SLOTKEEPER_*, and the files that hold its secrets (*_FILE).

Commands that ask a sidecar read only some of them, and start sooner without `Settings`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Final

from slotkeeper.values import UsageError, nearest, removed

PREFIX: Final = "SLOTKEEPER_"
SECRETS: Final = ("engine_api_key", "admin_token", "hints")
USUAL_ADMIN_LISTEN: Final = "127.0.0.1:9090"
OTHERS: Final = frozenset({f"{PREFIX}ENGINE_PARENT"})  # set for an engine of ours (engine/child/xllama.py)
# Kubernetes sets variables of these names for each Service.
_LINK: Final = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_|$)|_PORT(_\d+_(TCP|UDP|SCTP).*)?$")


def some_variables(*names: str) -> dict[str, str]:
    """Return the values of some settings that the environment has, as `Settings` reads them: in any case.

    Raises UsageError for an unreadable file.
    """
    found = {name.lower(): value for name, value in os.environ.items()}
    wanted = {name: f"{PREFIX}{name}".lower() for name in names}
    return secret_files(names) | {name: found[key] for name, key in wanted.items() if key in found}


def secret_files(names: Collection[str] = SECRETS) -> dict[str, str]:
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


def check_names(names: Collection[str], settings: Collection[str] | None = None) -> None:
    """Raise UsageError for a misspelt variable of these settings, which would be ignored silently otherwise.

    `settings`: the names of all settings, of which another may have been meant; None: `names` are all.
    Names that resemble no setting are ignored: they may belong to another program, such as Kubernetes.
    """
    settings = names if settings is None else settings
    known = {name.upper(): name for name in settings}  # without the prefix -> setting
    known |= {f"{name.upper()}_FILE": name for name in SECRETS if name in settings}
    for name in os.environ:
        word = name.removeprefix(PREFIX)
        if word == name or word in known or name in OTHERS or _LINK.search(name):
            continue
        if (gone := removed(word)) and len(names) == len(settings):  # this command reads all settings
            raise UsageError(f"{name}: there is no such variable{gone}")
        probably = nearest(word, known)
        if probably and known[probably] in names:
            raise UsageError(f"{name}: there is no such variable; did you mean {PREFIX}{probably}?")
