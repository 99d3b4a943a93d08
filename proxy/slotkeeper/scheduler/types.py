"""What every module shares: ids, places, reasons, token ids, and the boundaries of a prompt.

Token ids are one immutable block of memory, so that comparing prompts costs microseconds.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NewType, Self

from slotkeeper.scheduler import media
from slotkeeper.scheduler.media import Chunk

EngineId = NewType("EngineId", str)  # its name, else its base URL; of a router's model with #MODEL
SlotId = NewType("SlotId", int)
RequestId = NewType("RequestId", str)
ModelName = NewType("ModelName", str)  # as its router lists it
ClientId = NewType("ClientId", str)  # whose queue: an API key's digest, else an address

NO_ROUTER: Final = ModelName("")  # whatever an engine without a router serves


def id_of(key: RequestId) -> str:
    """The client's id of the request that the scheduler calls "17:ID". A chore has its key alone.

    It is named at every call and in no context variable: what is done for one request often begins in the
    task of another, whose end has made room for it.
    """
    number, _, name = key.partition(":")
    return name if number.isdigit() else key


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """One slot of one engine. Every key of the scheduler is a Place."""

    engine: EngineId
    slot: SlotId

    def __str__(self) -> str:
        return f"{self.engine}#{self.slot}"


class Crowded(StrEnum):
    """Why a request may not be queued."""

    ALL = "all"  # the queue is as long as it may be
    CLIENT = "client"  # so many of this client's wait already
    KEY_QUEUED = "key_queued"  # so many of its key wait already, by the keys file
    KEY_CONCURRENT = "key_concurrent"  # so many of its key run or wait already, by the keys file
    KEY_TOKENS = "key_tokens"  # its key has used its tokens of this minute, by the keys file


class Reason(StrEnum):
    """Why a request was placed where it was: the same in logs, metrics, headers and tests."""

    CONTINUES = "continues"  # the request's messages extend those in the slot; decided without token ids
    PREFIX = "prefix"  # cheapest: this slot holds the longest reusable prefix
    RAM_CACHE = "ram_cache"  # the engine loads the prefix from its own RAM prompt cache
    SNAPSHOT = "snapshot"  # a snapshot was restored, because that is cheaper than any slot as it is
    COLD = "cold"  # no reusable prefix anywhere: the slot that loses least
    CLIENT_CHOSE = "client_chose"  # the request carried id_slot
    ENGINE_CHOSE = "engine_chose"  # left to the engine, because pinning would lose (engine.md T6)
    STEERED = "steered"  # the route ignores id_slot: the prefix was prefilled where the engine will look (T5)
    UNPINNABLE = "unpinnable"  # it takes a slot that cannot be chosen (embeddings, n > 1)
    BRIEF = "brief"  # so short that the slot that loses least is best, whatever it holds
    UNRENDERED = "unrendered"  # the prompt's tokens are unknown: placed by messages or age alone
    SLOTLESS = "slotless"  # it takes no slot, and waited only for its model to be loaded
    BYPASS = "bypass"  # X-Slotkeeper-Bypass: 1
    FAIL_OPEN = "fail_open"  # Slotkeeper failed; the request went through unchanged


# -- token ids -------------------------------------------------------------------------------------------
# A common prefix is found by bisection over slices, each compared with memcmp: 200,000 tokens with 180,000 in
# common take 0.06 ms, where a loop over Python integers takes 4 ms.

WIDTH: Final = 4  # bytes of an id: llama_token is an int32
MOST_FOUND: Final = 20_000  # more than messages in a conversation: a text that is made of markers has more


class Tokens:
    """An immutable sequence of token ids, of one namespace.

    Sequences of two namespaces have nothing in common, whatever their ids: so no state, branch or file of one
    is ever found for a prompt of the other. Without namespaces all are of the same, which has no name.
    """

    __slots__ = ("chunks", "packed", "space")

    packed: bytes
    space: str
    chunks: tuple[Chunk, ...]  # its images, whose places have negative numbers instead of ids

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self.packed = array("i", ids).tobytes()
        self.space = ""
        self.chunks = ()

    @classmethod
    def of(cls, packed: bytes, space: str = "", chunks: tuple[Chunk, ...] = ()) -> Self:
        """Tokens from ids already packed as native int32."""
        tokens = cls.__new__(cls)
        tokens.packed = packed
        tokens.space = space
        tokens.chunks = chunks
        return tokens

    @classmethod
    def image(cls, digest: bytes, length: int) -> Self:
        """An image that takes so many tokens."""
        return cls.of(media.packed(digest, length), chunks=(Chunk(0, length, digest),))

    def within(self, space: str) -> Tokens:
        """The same ids in this namespace."""
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
        chunks = (*self.chunks, *media.moved(other.chunks, len(self))) if other.chunks else self.chunks
        return Tokens.of(self.packed + other.packed, self.space, chunks)

    def __repr__(self) -> str:
        head = ", ".join(str(i) for i in self.cut(0, 4))
        return f"<Tokens {len(self)}: {head}{', ...' if len(self) > 4 else ''}>"

    def cut(self, start: int = 0, end: int | None = None) -> Tokens:
        """The ids from `start` up to but without `end`, as a slice would give them."""
        if start == 0 and (end is None or end >= len(self)):
            return self  # nothing is copied, and its hash is known
        view = memoryview(self.packed).cast("i")[start:end]
        chunks = media.between(self.chunks, start, start + len(view)) if self.chunks else ()
        return Tokens.of(view.tobytes(), self.space, chunks)

    def ids(self) -> list[int]:
        """The ids as a list, for JSON."""
        return array("i", self.packed).tolist()

    def lcp(self, other: Tokens, start: int = 0) -> int:
        """Length of the longest common prefix with `other`, of which the first `start` are passed over.

        In tokens; it never ends inside an image. Where all of ours is found there, nothing is copied.
        """
        if self.space != other.space:
            return 0
        common = self.same_ids(other, start)
        return media.whole(self.chunks, common) if self.chunks else common

    def same_ids(self, other: Tokens, start: int = 0) -> int:
        """The same, of the ids alone."""
        a, b, shift = self.packed, other.packed, start * WIDTH
        if b.startswith(a, shift):
            return len(self)
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
        """Whether a prompt of ours may end there (`media.sendable`)."""
        return not self.chunks or media.sendable(self.chunks, at) == at

    def begins_with(self, other: Tokens) -> bool:
        return self.space == other.space and self.packed.startswith(other.packed)

    def find_all(self, needle: Tokens, most: int = MOST_FOUND) -> list[int]:
        """Every index at which `needle` begins, in order; no more than the first `most`."""
        found: list[int] = []
        at = 0
        if not needle.packed:
            return found
        while len(found) < most and (at := self.packed.find(needle.packed, at)) >= 0:
            if at % WIDTH == 0:
                found.append(at // WIDTH)
                at += WIDTH
            else:
                at += 1
        return found


EMPTY: Final = Tokens()


# -- the boundaries of a prompt: where it is likely that another prompt will part from it ----------------
# They are found by the marks that the engine's template puts in front of messages. What marks cannot tell
# (where system text ends inside a user message, or anything in a template of no known family) is found by
# rendering the chat otherwise, and handed in.


class BoundaryKind(StrEnum):
    """What begins at a boundary."""

    HEAD = "head"  # the first message after tools and system text, which other conversations share
    USER = "user"  # a user message
    TOOL = "tool"  # the result of a tool
    QUESTION = "question"  # the last paragraph or line of a long user message at the end
    LINE = "line"  # a line further back in it
    TURN = "turn"  # the reply: all that was asked stands before it


@dataclass(frozen=True, slots=True, order=True)
class Boundary:
    """A place of a prompt where another one will probably part from it."""

    at: int  # tokens before it
    kind: BoundaryKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Markers:
    """What opens a message in an engine's template, as that engine tokenizes it. Empty: not known."""

    user: tuple[Tokens, ...] = ()
    tool: tuple[Tokens, ...] = ()  # may begin as a user message does: then it is the tool's (ChatML)
    reply: tuple[Tokens, ...] = ()  # none beside `user`: the template has no generation prompt (Mistral)
    lead_inside: bool = False  # tools or system text stand inside a user message (Gemma, older Mistral)


UNKNOWN = Markers()


def boundaries(prompt: Tokens, markers: Markers, rendered: Iterable[Boundary] = ()) -> tuple[Boundary, ...]:
    """The boundaries of a prompt in ascending order, one at a place.

    Where two fall together HEAD counts before TOOL, and TOOL before USER.

    * HEAD is the one that was handed in, and then nothing is said of what stands before it. Else it is the
      first message of all, of whatever kind, unless something of the lead may stand behind its opener.
    * TURN is the last opener of a reply, if nothing was asked behind it. Without one it is the prompt's end,
      if messages are known to begin in it. So it may be at `len(prompt)`; all others are below that.

    Args:
        prompt: the ids that the engine evaluates.
        markers: of the engine's template. Text of a message that spells a marker is taken for one.
        rendered: what was found by rendering the chat otherwise.
    """
    kinds = dict.fromkeys(_starts(prompt, markers.user), BoundaryKind.USER)
    kinds |= dict.fromkeys(_starts(prompt, markers.tool), BoundaryKind.TOOL)
    for boundary in sorted(rendered, reverse=True):  # so that of two at one place HEAD comes last
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
    """Those of some places that lie in something that the model said, as far as the markers tell."""
    asked = [boundary.at for boundary in found if boundary.kind is not BoundaryKind.TURN]  # ascending
    replies = _starts(prompt, markers.reply)
    return {at for at in places if _last(replies, at) > _last(asked, at)}


def _last(starts: Sequence[int], at: int) -> int:
    """The last of them that is not behind `at`, -1 if none is."""
    index = bisect_right(starts, at)
    return starts[index - 1] if index else -1


def _head(kinds: Mapping[int, BoundaryKind], markers: Markers, openers: Iterable[int]) -> int | None:
    """Where the first message begins: as it was handed in, else at the first of all openers."""
    for at, kind in kinds.items():
        if kind is BoundaryKind.HEAD:
            return at
    return min(openers, default=None) if markers.user and not markers.lead_inside else None


def _turn(prompt: Tokens, markers: Markers, replies: Sequence[int], last: int) -> int | None:
    """Where the reply begins; `last` is where the last message was asked, -1 for none."""
    if replies and replies[-1] > last:
        return replies[-1]
    return len(prompt) if markers.user and last >= 0 else None


def _starts(prompt: Tokens, openers: Iterable[Tokens]) -> list[int]:
    return sorted({at for opener in openers for at in prompt.find_all(opener)})


# -- how a long message ends: often in a question about the rest -----------------------------------------
# The lines are found in the message's text. Where one begins in a prompt is told by the ids of all that
# follows it in the message: where they stand there, a token ends before them.

LONG: Final = 1024  # tokens of a message: in a shorter one the engine's own checkpoints are near enough
REACH: Final = 8192  # characters before its end
FURTHER: Final = 1024  # characters before the end: the first cut that is neither
SPREAD: Final = 4  # each of them so many times as far from the end as the one behind it
CLOSING: Final = 64  # tokens of a template behind a message, at most


def last_message(found: Sequence[Boundary], length: int) -> range | None:
    """The tokens of the user message that ends a prompt, if it is a long one."""
    asked = [boundary for boundary in found if boundary.kind is not BoundaryKind.TURN]
    if not asked or asked[-1].kind is BoundaryKind.TOOL:
        return None
    end = found[-1].at if found[-1].kind is BoundaryKind.TURN else length
    message = range(asked[-1].at, end)
    return message if len(message) >= LONG else None


def endings(text: str) -> list[tuple[str, BoundaryKind]]:
    """The ends of a message that begin with a line: the last paragraph and line, and a few further back."""
    tail = text.rstrip()[-REACH:]
    starts = list(_line_starts(tail))
    if not starts:
        return []
    paragraph = next((at for at, first in reversed(starts) if first), None)
    kinds = dict.fromkeys(_spread([len(tail) - at for at, _ in starts]), BoundaryKind.LINE)
    kinds |= {len(tail) - at: BoundaryKind.QUESTION for at in (starts[-1][0], paragraph) if at is not None}
    return [(tail[-length:], kinds[length]) for length in sorted(kinds)]


def _line_starts(text: str) -> Iterator[tuple[int, bool]]:
    """Where lines begin that are not blank, but for the first; and whether a paragraph begins there."""
    at, blank = 0, False
    for line in text.split("\n"):
        if at and line.strip():
            yield at, blank
        blank = at > 0 and not line.strip()  # the first line may be cut short
        at += len(line) + 1


def _spread(lengths: Sequence[int]) -> Iterator[int]:
    """Of lengths of endings some, each several times the one before."""
    least = FURTHER
    for length in reversed(lengths):
        if length >= least:
            yield length
            least = SPREAD * length


def begins(prompt: Tokens, message: range, ending: Tokens) -> int | None:
    """Tokens before an ending of a message, None where no token begins there.

    Its last token may be another one in the prompt, where it merges with what the template puts behind it.
    """
    start = max(message.start + 1, message.stop - len(ending) - CLOSING)
    there = prompt.cut(start, message.stop)
    for known in (ending, ending.cut(0, len(ending) - 1)):
        if places := there.find_all(known):
            return start + places[-1]
    return None
