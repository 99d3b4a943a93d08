"""Which rule is in which mode, for which client: `--rules NAME=MODE[@CLIENT]`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Final, Self

from slotkeeper.conversation.rules.base import Mode, RuleName

ALL: Final = "all"
ANYBODY: Final = "*"

Modes = Mapping[RuleName, Mode]


@dataclass(frozen=True, slots=True)
class Setting:
    """One of the user's choices."""

    names: tuple[RuleName, ...]
    mode: Mode
    client: str = ANYBODY  # a shell pattern for its User-Agent, in lower case

    @classmethod
    def parse(cls, text: str) -> Self:
        """`NAME=MODE` or `NAME=MODE@CLIENT`; NAME may be `all`. Raises ValueError that says what is meant."""
        name, equals, rest = text.strip().partition("=")
        mode, _, client = rest.partition("@")
        if not equals or mode not in tuple(Mode):
            raise ValueError(f"{text!r} is not NAME=MODE or NAME=MODE@CLIENT, with MODE one of {_list(Mode)}")
        if name != ALL and name not in tuple(RuleName):
            raise ValueError(f"there is no rule {name!r}; rules are {_list(RuleName)}, or all of them: {ALL}")
        names = tuple(RuleName) if name == ALL else (RuleName(name),)
        return cls(names, Mode(mode), client.lower() or ANYBODY)


@dataclass(frozen=True, slots=True)
class Choice:
    """What the user chose, over what every rule is by itself. Of several that fit, the last one counts."""

    settings: tuple[Setting, ...]
    defaults: Modes

    @classmethod
    def of(cls, texts: Iterable[str], defaults: Modes) -> Self:
        """Raises ValueError."""
        return cls(tuple(Setting.parse(text) for text in texts), MappingProxyType(dict(defaults)))

    def for_client(self, user_agent: str) -> Modes:
        modes = dict(self.defaults)
        for setting in self.settings:
            if fnmatchcase(user_agent.lower(), setting.client):
                modes |= dict.fromkeys(setting.names, setting.mode)
        return modes


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)
