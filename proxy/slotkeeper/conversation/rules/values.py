"""JSON values compared: whether they say the same, and whether they are written the same."""

from __future__ import annotations

import json
from typing import Any, Final

_SETS: Final = frozenset({"required"})  # lists of a JSON schema whose order says nothing
_DATA: Final = frozenset({"default", "enum", "const", "examples"})  # what stands below them is no schema
_EXACT: Final = 1 << 53  # integers up to here are the same as doubles


def alike(one: Any, other: Any, *, schema: bool = False) -> bool:
    """Whether both are the same JSON value: `1` is `1.0`, the order of keys says nothing.

    In a schema the order of `required` says nothing either.
    """
    try:
        return _alike(one, other, schema)
    except RecursionError:
        return False


def same_writing(one: Any, other: Any) -> bool:
    """Whether both become the same JSON text: the order of keys counts, and `1` is not `1.0`."""
    if isinstance(one, str) or isinstance(other, str):
        return bool(one == other)
    try:
        return repr(one) == repr(other)
    except RecursionError:  # too deep to be compared: no rule changes it
        return True


def size(value: Any) -> int:
    """Of its writing, in characters; 0 for what is too deep to be compared."""
    try:
        return len(repr(value))
    except RecursionError:
        return 0


def parsed(arguments: Any) -> Any:
    """The arguments of a call: their JSON text read, or the object itself. None for what is not JSON."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return None


def _alike(one: Any, other: Any, schema: bool) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_member(key, one, other, schema) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_alike(a, b, schema) for a, b in zip(one, other, strict=True))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return _same_number(one, other)
    return type(one) is type(other) and bool(one == other)


def _member(key: str, one: dict[str, Any], other: dict[str, Any], schema: bool) -> bool:
    a, b = one[key], other[key]
    if schema and key in _SETS and _names(a) and _names(b):
        return sorted(a) == sorted(b)
    return _alike(a, b, schema and key not in _DATA)


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _same_number(one: float, other: float) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return one == other and (type(one) is type(other) or abs(one) < _EXACT)
