"""What classes and fields of events and effects were called when the digests were written.

A step of a redesign that renames a class or a field, or gives its content another form, adds a line here
instead of writing the digests anew: equal digests then prove that no decision changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

Fields = Mapping[str, Any]  # of one object; what is in them has its earlier form already
Form = Callable[[Fields], tuple[str, Fields]]


def called(name: str, **fields: str) -> Form:
    """Return the form of a class that was called `name`; `fields`: the present name of each renamed field."""
    before = {now: then for then, now in fields.items()}
    return lambda found: (name, {before.get(field, field): value for field, value in found.items()})


# Present name of a class -> what it was. For example, of a `Seed` that was a `Plant` whose `tokens` are its
# `prompt` now: "Seed": called("Plant", tokens="prompt").
BEFORE: Final[Mapping[str, Form]] = {
    "Prefill": called("Plant"),
    "Save": lambda found: ("Save", {"size": 0, **found}),  # no default then
    "Saved": lambda found: ("Filed" if "engine" in found else "Saved", found),
}
