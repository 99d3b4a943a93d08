"""Messages compared loosely: without what changes by itself, so that a rewritten one is known again."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import orjson

from slotkeeper.conversation.requests.facts import bare
from slotkeeper.conversation.requests.layout import Call, Layout, Message, Role, Section

DIGEST_BYTES: Final = 16
REMEMBERED: Final = 64
LARGEST: Final = 2**21  # characters of a message that is kept for that
# By identity, since the very same messages come again (api.layouts) and equal ones take as long to compare.
_DIGESTS: Final[dict[int, tuple[Message, bytes]]] = {}
_EXACT: Final = 2**53  # from here on not every whole number is a float


class _Form(NamedTuple):
    """What is left of a message when everything is gone that may differ."""

    role: Role
    said: str
    calls: tuple[tuple[str, bytes], ...]
    media: tuple[bytes, ...]


def same(one: Message, other: Message) -> bool:
    """Whether it is the same message, but for facts, reminders, reasoning, ids, and white space at ends.

    How its text is parted is nothing, and so are blank lines: a fact may have stood between them.
    """
    return one is other or _alike(one, other) or _form(one) == _form(other)


def common(old: Layout, new: Layout) -> int:
    """How many messages behind the system text are the same, from the first on.

    Cheap where texts are equal: only those that differ are looked into.
    """
    pairs = zip(old.messages[old.lead :], new.messages[new.lead :], strict=False)
    count = 0
    for one, other in pairs:
        if not same(one, other):
            break
        count += 1
    return count


def digest(message: Message) -> bytes:
    """Equal for messages that are the same. Remembered for the last ones, as clients send them again."""
    known = _DIGESTS.pop(id(message), None)
    if known is None or known[0] is not message:
        if _size(message) > LARGEST:
            return _digest(message)
        known = message, _digest(message)
    _DIGESTS[id(message)] = known
    if len(_DIGESTS) > REMEMBERED:
        with suppress(RuntimeError):  # large bodies are read in a thread: it has come in between
            _DIGESTS.pop(next(iter(_DIGESTS)), None)
    return known[1]


def _digest(message: Message) -> bytes:
    form = _form(message)
    hashed = blake2b(digest_size=DIGEST_BYTES)
    pieces = [form.role.encode(), _bytes(form.said), *form.media]
    for name, arguments in form.calls:
        pieces += [_bytes(name), arguments]
    for piece in pieces:
        hashed.update(b"%d:" % len(piece))
        hashed.update(piece)
    return hashed.digest()


def _size(message: Message) -> int:
    """Characters. Arguments that are objects are written out: they may be all of it."""
    calls = sum(
        len(c.arguments if isinstance(c.arguments, str) else _value(c.arguments)) for c in message.calls
    )
    return sum(len(text.text) for text in message.pieces()) + calls


def _alike(one: Message, other: Message) -> bool:
    """Whether nothing in it has to be looked into."""
    return (
        one.role is other.role
        and one.media == other.media
        and [text.text for text in one.texts] == [text.text for text in other.texts]
        and _as_sent(one.calls) == _as_sent(other.calls)
    )


def _as_sent(calls: Iterable[Call]) -> list[tuple[str, str | bytes]]:
    """Not the objects themselves: to Python, 1 and true are one."""
    return [(c.name, c.arguments if isinstance(c.arguments, str) else _value(c.arguments)) for c in calls]


def _form(message: Message) -> _Form:
    said = (bare(text) for text in message.texts if text.section is not Section.REASONING)
    return _Form(
        role=message.role,
        said="\n".join(text for text in said if text),
        calls=tuple((call.name, _value(call.arguments)) for call in message.calls),
        media=message.media,
    )


def _value(arguments: Any) -> bytes:
    """Equal for equal JSON values, however they are written."""
    value = arguments
    if isinstance(arguments, str):
        try:
            value = orjson.loads(arguments) if arguments.strip() else {}
        except orjson.JSONDecodeError:  # cut short, or no JSON at all
            return _bytes(arguments.strip())
    try:
        return orjson.dumps(_whole(value), option=orjson.OPT_SORT_KEYS)
    except (orjson.JSONEncodeError, RecursionError):  # nested too deep: then it is like nothing but itself
        return _bytes(arguments) if isinstance(arguments, str) else b"%d" % id(arguments)


def _whole(value: Any) -> Any:
    """With 1 for 1.0: agents that read arguments and write them again often change that."""
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    if isinstance(value, dict):
        return {key: _whole(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_whole(inner) for inner in value]
    return value


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
