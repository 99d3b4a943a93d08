"""Every rule, in the order in which they are applied: the head first, white space last."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from slotkeeper.core.canonical.calls import CallIds, ToolCalls
from slotkeeper.core.canonical.modes import Modes
from slotkeeper.core.canonical.moving import (
    Clock,
    Countdown,
    Date,
    Environment,
    GitStatus,
    MemoryFile,
    WorkingDirectory,
)
from slotkeeper.core.canonical.reminders import Reminders
from slotkeeper.core.canonical.rules import Rule
from slotkeeper.core.canonical.stable import BillingNonce, Reasoning, TrailingWhitespace
from slotkeeper.core.canonical.tools import SchemaKeys, ToolOrder

RULES: Final[tuple[Rule, ...]] = (
    BillingNonce(),
    SchemaKeys(),
    ToolOrder(),
    Date(),
    Clock(),
    WorkingDirectory(),
    GitStatus(),
    Environment(),
    MemoryFile(),
    Countdown(),
    Reminders(),
    CallIds(),
    ToolCalls(),
    Reasoning(),
    TrailingWhitespace(),
)
DEFAULTS: Final[Modes] = MappingProxyType({rule.name: rule.default for rule in RULES})
