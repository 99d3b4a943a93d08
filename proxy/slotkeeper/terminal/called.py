"""Names of conversations and what requests do at the moment, as a terminal shows them.

The names themselves are made by the sidecar (conversation/naming.py).
"""

from __future__ import annotations

from typing import Any, Final

from slotkeeper.observe.why.moment import Doing
from slotkeeper.terminal.figures import UNKNOWN, age, one_line, seconds

Row = dict[str, Any]

# Cells of a name, by the columns that there are at least.
NAMES: Final = ((180, 48), (100, 24), (0, 20))


def called(row: Row, now: float | None = None) -> str:
    """Its conversation's name; with its age where nothing says what it is about."""
    name = row.get("name")
    if not name:
        return UNKNOWN
    began = row.get("conversation_began")
    if row.get("about") or now is None or began is None:
        return one_line(name)
    return one_line(f"{name}, {age(began, now)}")


def fitting(name: str, width: int) -> str:
    """For a table of so many columns."""
    room = next(cells for columns, cells in NAMES if width >= columns)
    return name if len(name) <= room else name[: room - 1] + "…"


def doing(now: Row | None) -> str:
    """Of `now` as the admin port has it; empty for what has ended."""
    if now is None:
        return ""
    match now["doing"]:
        case Doing.QUEUED:
            return f"in line, place {now['place']}" if now["place"] else "waits for an engine"
        case Doing.PREFILL:
            return prefill(now)
        case _:
            return str(now["doing"])


def prefill(now: Row) -> str:
    if now["percent"] is None:
        return "prefill"
    about = "about " if now["estimated"] else ""
    left = f", {seconds(now['seconds_left'])} left" if now["seconds_left"] is not None else ""
    return f"prefill {about}{now['percent']} %{left}"
