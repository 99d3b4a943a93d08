"""The structure of a prompt: its boundaries, where it is likely that another prompt will part from it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What begins at a boundary."""

    HEAD = "head"  # the first message after tools and system text, which other conversations share
    USER = "user"  # a user message
    TOOL = "tool"  # the result of a tool
    TURN = "turn"  # the reply: all that was asked stands before it


@dataclass(frozen=True, slots=True, order=True)
class Boundary:
    at: int  # tokens before it
    kind: Kind
