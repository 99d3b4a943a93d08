"""Every rule, in the order in which they are applied: the head first, white space last."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from slotkeeper.conversation.rules.base import Rule
from slotkeeper.conversation.rules.calls import CallIds, ToolCalls
from slotkeeper.conversation.rules.modes import Modes
from slotkeeper.conversation.rules.moving import (
    Clock,
    Countdown,
    Date,
    Environment,
    GitStatus,
    MemoryFile,
    WorkingDirectory,
)
from slotkeeper.conversation.rules.reminders import Reminders
from slotkeeper.conversation.rules.stable import BillingNonce, Reasoning, TrailingWhitespace
from slotkeeper.conversation.rules.tools import SchemaKeys, ToolOrder

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
