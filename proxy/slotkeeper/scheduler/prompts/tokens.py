"""The token ids of a prompt, the images in it, and its boundaries.

Token ids are stored as one immutable block of bytes, so comparing two prompts costs microseconds.

An image takes as many tokens of a prompt as the engine counts for it, with the text that the engine puts
around it. In our sequences negative numbers represent them, made from the image's digest and its length. So
code that compares sequences works unchanged, and two images never compare equal. The engine reuses a whole
image or none of it, so a common prefix never ends inside a chunk. These numbers are never sent to the engine.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import shake_256
from typing import Final, Self

# -- images ----------------------------------------------------------------------------------------------

_BITS: Final = 0x3FFFFFFF  # keeps the numbers below -1, which means "no token"
_LEAST: Final = -(2**31)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One image in a sequence."""

    start: int  # tokens before the image; negative if the sequence begins inside it
    length: int  # tokens
    digest: bytes  # of the image's bytes
    closed: bool = field(default=False, compare=False)  # whether the engine is known to put text behind it

    @property
    def end(self) -> int:
        return self.start + self.length


def _packed(digest: bytes, length: int) -> bytes:
    """Return the packed numbers that represent an image; another digest or length gives other numbers."""
    drawn = array("i", shake_256(digest + length.to_bytes(4, "little")).digest(length * array("i").itemsize))
    return array("i", (_LEAST + (number & _BITS) for number in drawn)).tobytes()


def _moved(chunks: Sequence[Chunk], by: int) -> tuple[Chunk, ...]:
    return tuple(replace(chunk, start=chunk.start + by) for chunk in chunks)


def outside(chunks: Sequence[Chunk], at: int) -> int:
    """Return the last index up to `at` that is not inside a chunk."""
    return next((max(0, chunk.start) for chunk in chunks if chunk.start < at < chunk.end), at)


def prompt_end(chunks: Sequence[Chunk], at: int) -> int:
    """Return the last index up to `at` at which one of our own prompts may end.

    A prompt must not end inside an image, which cannot be cut, nor right behind one that is not known to be
    closed: an engine whose projector puts no text there then aborts (engine.md 15).
    """
    for chunk in reversed(chunks):
        if chunk.start < at <= chunk.end and not (chunk.closed and at == chunk.end):
            at = max(0, chunk.start)
    return at


def text_ranges(chunks: Sequence[Chunk], length: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of each text in a sequence: before, between and behind the chunks."""
    at = 0
    for chunk in chunks:
        yield at, chunk.start
        at = chunk.end
    yield at, length


# -- token ids -------------------------------------------------------------------------------------------
# A common prefix is found by bisection over slices, each compared with memcmp. Two prompts of 200,000 tokens
# that share 180,000 take 0.06 ms; a loop over Python integers takes 4 ms.

WIDTH: Final = 4  # bytes of an id: llama_token is an int32
MOST_FOUND: Final = 20_000  # more than a conversation has messages; only a text made of markers has more


class Tokens:
    """An immutable sequence of token ids that belongs to one space: a namespace and a set of LoRA adapters.

    Sequences of two spaces have no common prefix, even if their ids are equal. So no state, branch or file
    of one space is found for a prompt of another. Without namespaces and adapters, `space` is always empty.
    """

    __slots__ = ("chunks", "packed", "space")

    packed: bytes
    space: str
    chunks: tuple[Chunk, ...]  # its images, whose places have negative numbers instead of ids

    def __init__(self, ids: Iterable[int] = ()) -> None:
        """Pack ids. Raises OverflowError for a number that is no int32, TypeError for what is no integer."""
        self.packed = array("i", ids).tobytes()
        self.space = ""
        self.chunks = ()

    @classmethod
    def of(cls, packed: bytes, space: str = "", chunks: tuple[Chunk, ...] = ()) -> Self:
        """Build tokens from ids that are already packed as native int32."""
        tokens = cls.__new__(cls)
        tokens.packed = packed
        tokens.space = space
        tokens.chunks = chunks
        return tokens

    @classmethod
    def image(cls, digest: bytes, length: int, *, closed: bool = False) -> Self:
        """Build the tokens of an image; `closed`: the engine is known to put text behind it."""
        return cls.of(_packed(digest, length), chunks=(Chunk(0, length, digest, closed),))

    def within(self, space: str) -> Tokens:
        """Return the same ids in this space."""
        return self if space == self.space else Tokens.of(self.packed, space, self.chunks)

    def __len__(self) -> int:
        return len(self.packed) // WIDTH

    def __iter__(self) -> Iterator[int]:
        return iter(array("i", self.packed))

    def __getitem__(self, index: int) -> int:
        return memoryview(self.packed).cast("i")[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokens) and self.packed == other.packed and self.space == other.space

    def __hash__(self) -> int:
        return hash((self.packed, self.space)) if self.space else hash(self.packed)

    def __add__(self, other: Tokens) -> Tokens:
        chunks = (*self.chunks, *_moved(other.chunks, len(self))) if other.chunks else self.chunks
        return Tokens.of(self.packed + other.packed, self.space, chunks)

    def __repr__(self) -> str:
        head = ", ".join(str(i) for i in self.cut(0, 4))
        return f"<Tokens {len(self)}: {head}{', ...' if len(self) > 4 else ''}>"

    def cut(self, start: int = 0, end: int | None = None) -> Tokens:
        """Return the ids from `start` up to, not including, `end`, like a slice."""
        if start == 0 and (end is None or end >= len(self)):
            return self  # avoids a copy
        view = memoryview(self.packed).cast("i")[start:end]
        chunks: tuple[Chunk, ...] = ()
        if self.chunks:  # those that the part cuts are included
            end = start + len(view)
            chunks = _moved([each for each in self.chunks if each.start < end and each.end > start], -start)
        return Tokens.of(view.tobytes(), self.space, chunks)

    def ids(self) -> list[int]:
        """Return the ids as a list, for JSON."""
        return array("i", self.packed).tolist()

    def lcp(self, other: Tokens, start: int = 0) -> int:
        """Return the length in tokens of the longest common prefix with `other`, read from `start` on.

        The prefix never ends inside an image. If one contains all ids of the other, nothing is copied.
        """
        if self.space != other.space:
            return 0
        common = self._same_ids(other, start)
        return outside(self.chunks, common) if self.chunks else common

    def _same_ids(self, other: Tokens, start: int) -> int:
        """Return the same for the ids alone: spaces do not count, and the prefix may end inside an image."""
        a, b, shift = self.packed, other.packed, start * WIDTH
        if b.startswith(a, shift):
            return len(self)
        if not shift and a.startswith(b):
            return len(other)
        low, high, step = 0, min(len(self), max(0, len(other) - start)), 64
        while low < high and (end := min(low + step, high)):
            if a[low * WIDTH : end * WIDTH] != b[shift + low * WIDTH : shift + end * WIDTH]:
                high = end
                break
            low, step = end, step * 4
        while low < high - 1:  # the prefixes of `low` tokens are equal, those of `high` are not
            middle = (low + high) // 2
            if a[low * WIDTH : middle * WIDTH] == b[shift + low * WIDTH : shift + middle * WIDTH]:
                low = middle
            else:
                high = middle
        return low

    def may_end(self, at: int) -> bool:
        """Whether a prefill of ours may end there (see `prompt_end`)."""
        return not self.chunks or prompt_end(self.chunks, at) == at

    def begins_with(self, other: Tokens) -> bool:
        return self.space == other.space and self.packed.startswith(other.packed)

    def find_all(self, needle: Tokens, most: int = MOST_FOUND) -> list[int]:
        """Return the first `most` indexes at which `needle` begins, in ascending order."""
        starts: list[int] = []
        at = 0
        if not needle.packed:
            return starts
        while len(starts) < most and (at := self.packed.find(needle.packed, at)) >= 0:
            if at % WIDTH == 0:
                starts.append(at // WIDTH)
                at += WIDTH
            else:
                at += 1
        return starts


EMPTY: Final = Tokens()


class ComparedPrompt(Tokens):
    """A prompt that finds its common prefix with each other sequence only once.

    It is for one decision, which asks for the same prefixes many times; it keeps those sequences alive.
    """

    __slots__ = ("_found",)

    def __init__(self, prompt: Tokens) -> None:
        self.packed, self.space, self.chunks = prompt.packed, prompt.space, prompt.chunks
        self._found: dict[int, tuple[Tokens, int]] = {}  # by identity of the kept sequence

    def lcp(self, other: Tokens, start: int = 0) -> int:
        if start:
            return super().lcp(other, start)
        known = self._found.get(id(other))
        if known is None:
            known = self._found[id(other)] = other, super().lcp(other)
        return known[1]


# -- the boundaries of a prompt: where another prompt is likely to diverge from it -----------------------
# They are found by the markers that the engine's template puts before messages. Markers do not show where
# system text ends inside a user message, and they are unknown for a template of no known family. Such
# boundaries are found by rendering the chat in another way, and passed in.


class BoundaryKind(StrEnum):
    """What begins at a boundary."""

    HEAD = "head"  # the first message after tools and system text, which other conversations share
    USER = "user"  # a user message
    TOOL = "tool"  # the result of a tool
    QUESTION = "question"  # the last paragraph or line of a long user message at the end
    LINE = "line"  # an earlier line of that message
    TURN = "turn"  # the reply: everything before it is the question


@dataclass(frozen=True, slots=True, order=True)
class Boundary:
    """A place in a prompt where another prompt is likely to diverge from it."""

    at: int  # number of tokens before the boundary
    kind: BoundaryKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Markers:
    """The tokens that open a message in an engine's template, as it tokenizes them. Empty: unknown."""

    user: tuple[Tokens, ...] = ()
    tool: tuple[Tokens, ...] = ()  # may begin like `user` (ChatML): then it counts as the tool's
    reply: tuple[Tokens, ...] = ()  # empty beside `user`: there is no generation prompt (Mistral)
    lead_inside: bool = False  # tools or system text are inside a user message (Gemma, older Mistral)


UNKNOWN = Markers()


def boundaries(prompt: Tokens, markers: Markers, rendered: Iterable[Boundary] = ()) -> tuple[Boundary, ...]:
    """Return the boundaries of a prompt in ascending order, at most one for each place.

    Where two coincide, HEAD takes precedence over TOOL, and TOOL over USER.

    * HEAD is the one in `rendered`; then no boundary before it is returned. Otherwise it is the first message
      of any kind, unless tools or system text may follow its opener.
    * TURN is the last opener of a reply, if no question follows it. If there is none, TURN is the prompt's
      end, provided that the prompt is known to contain messages. So TURN may be at `len(prompt)`; every other
      boundary is before that.

    Args:
        prompt: the ids that the engine evaluates.
        markers: those of the engine's template. Message text that spells out a marker counts as a marker.
        rendered: boundaries that were found by rendering the chat in another way.
    """
    kinds = dict.fromkeys(_starts(prompt, markers.user), BoundaryKind.USER)
    kinds |= dict.fromkeys(_starts(prompt, markers.tool), BoundaryKind.TOOL)
    for boundary in sorted(rendered, reverse=True):  # so that HEAD wins where two coincide
        if boundary.at < len(prompt):
            kinds[boundary.at] = boundary.kind
    replies = _starts(prompt, markers.reply)
    turn = _turn(prompt, markers, replies, last=max(kinds, default=-1))
    head = _head(kinds, markers, (at for at in (*kinds, *replies) if at != turn))
    if head is not None:
        kinds = {at: kind for at, kind in kinds.items() if at > head} | {head: BoundaryKind.HEAD}
    if turn is not None:
        kinds[turn] = BoundaryKind.TURN
    return tuple(Boundary(at, kinds[at]) for at in sorted(kinds))


def in_replies(
    places: Iterable[int], prompt: Tokens, found: Iterable[Boundary], markers: Markers
) -> set[int]:
    """Return those of the places that are inside a reply of the model, as far as the markers show."""
    asked = [boundary.at for boundary in found if boundary.kind is not BoundaryKind.TURN]  # ascending
    replies = _starts(prompt, markers.reply)
    return {at for at in places if _last(replies, at) > _last(asked, at)}


def _last(starts: Sequence[int], at: int) -> int:
    """Return the last start that is at or before `at`; -1 if there is none."""
    index = bisect_right(starts, at)
    return starts[index - 1] if index else -1


def _head(kinds: Mapping[int, BoundaryKind], markers: Markers, openers: Iterable[int]) -> int | None:
    """Return where the first message begins: the HEAD that was passed in, else the first opener."""
    for at, kind in kinds.items():
        if kind is BoundaryKind.HEAD:
            return at
    return min(openers, default=None) if markers.user and not markers.lead_inside else None


def _turn(prompt: Tokens, markers: Markers, replies: Sequence[int], last: int) -> int | None:
    """Return where the reply begins. `last` is where the last question begins; -1 if there is none."""
    if replies and replies[-1] > last:
        return replies[-1]
    return len(prompt) if markers.user and last >= 0 else None


def _starts(prompt: Tokens, openers: Iterable[Tokens]) -> list[int]:
    return sorted({at for opener in openers for at in prompt.find_all(opener)})


# -- endings of a long message: often a question about the text before it --------------------------------
# Lines are found in the message's text. To find where a line begins in the prompt, we look for the token ids
# of the message from that line to its end: where they occur, a token boundary precedes the line.

LONG: Final = 1024  # tokens of a message: in a shorter one, the engine's own checkpoints are near enough
REACH: Final = 8192  # characters at the end of a message in which lines are looked for
FURTHER: Final = 1024  # characters before the end: where the first cut of kind LINE may be
SPREAD: Final = 4  # the distance from the end grows by this factor from one such cut to the next
CLOSING: Final = 64  # tokens that a template puts after a message, at most


def last_message(found: Sequence[Boundary], length: int) -> range | None:
    """Return the range of tokens of the user message that ends a prompt; None if it is shorter than LONG."""
    asked = [boundary for boundary in found if boundary.kind is not BoundaryKind.TURN]
    if not asked or asked[-1].kind is BoundaryKind.TOOL:
        return None
    end = found[-1].at if found[-1].kind is BoundaryKind.TURN else length
    message = range(asked[-1].at, end)
    return message if len(message) >= LONG else None


def endings(text: str) -> list[tuple[str, BoundaryKind]]:
    """Return endings of a message: from the last paragraph, the last line and some earlier lines on."""
    tail = text.rstrip()[-REACH:]
    starts = list(_line_starts(tail))
    if not starts:
        return []
    paragraph = next((at for at, first in reversed(starts) if first), None)
    kinds = dict.fromkeys(_spread([len(tail) - at for at, _ in starts]), BoundaryKind.LINE)
    kinds |= {len(tail) - at: BoundaryKind.QUESTION for at in (starts[-1][0], paragraph) if at is not None}
    return [(tail[-length:], kinds[length]) for length in sorted(kinds)]


def _line_starts(text: str) -> Iterator[tuple[int, bool]]:
    """Yield where each non-blank line after the first begins, and whether it also begins a paragraph."""
    at, blank = 0, False
    for line in text.split("\n"):
        if at and line.strip():
            yield at, blank
        blank = at > 0 and not line.strip()  # the first line may be truncated
        at += len(line) + 1


def _spread(lengths: Sequence[int]) -> Iterator[int]:
    """Yield some of the lengths, in ascending order, each at least SPREAD times the one before."""
    least = FURTHER
    for length in reversed(lengths):
        if length >= least:
            yield length
            least = SPREAD * length


def begins(prompt: Tokens, message: range, ending: Tokens) -> int | None:
    """Return the number of tokens before an ending of a message; None if no token begins there.

    The last token of the ending may differ in the prompt, where it merges with the template text after it.
    """
    start = max(message.start + 1, message.stop - len(ending) - CLOSING)
    there = prompt.cut(start, message.stop)
    for known in (ending, ending.cut(0, len(ending) - 1)):
        if places := there.find_all(known):
            return start + places[-1]
    return None
