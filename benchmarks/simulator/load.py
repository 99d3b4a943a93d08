"""Loads of the simulator: conversations as token ids, recorded or synthetic.

A conversation is a sequence of turns. A turn is sent at its time, but not before the answer to the previous
turn has ended. Prompts are made when they are sent, so that a thousand conversations fit into memory.

* Recordings (docs/recording.md): four bytes of text are one token. That is about the ratio of vocabularies
  for code and English, and two texts have as long a common prefix as their bytes.
* Mooncake's traces (FAST'25): `timestamp` in milliseconds, `input_length`, `output_length`, `hash_ids` of
  blocks of 512 tokens. A partial block has a separate id, so the tokens that a reply left count as new.
* Synthetic: agents with a few system prompts, turns that grow, pauses between them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, Final

import orjson

from slotkeeper.api.head import classify
from slotkeeper.api.request import lay_out
from slotkeeper.bench.replay import Entry, LineError, Trace, TraceError, generates, merged, read
from slotkeeper.conversation.layout import Layout, Message, Role
from slotkeeper.scheduler.prompts.tokens import WIDTH, Boundary, BoundaryKind, Tokens

USER_MARK: Final = Tokens([1])  # begins a user message: no bytes of text equal it
BLOCK: Final = 512  # tokens of a block in Mooncake's traces
ID_STRIDE: Final = 2**31 // BLOCK  # block ids beyond that would share tokens
LONGEST_REPLY: Final = 2**20  # tokens; no model answers in more
LATEST: Final = 1e12  # seconds; much later times, as floats, are not exact to the millisecond
GUESSED_REPLY: Final = 200  # tokens of a recorded reply that no later request contains


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTurn:
    """One request and its answer. Times are seconds of simulated time."""

    prompt: Tokens
    reply: Tokens  # as the next turn will send it
    following: Tokens | None = None  # how the next turn is expected to begin; None: with prompt and reply
    chance: float = 1.0  # that it begins so, as the sidecar estimates it
    calls_tools: bool | None = None  # whether the answer asks for tools; None: the sidecar is not told
    at: float = 0.0  # the earliest time at which it is sent
    pause: float = 0.0  # the least time after the answer to the previous turn
    hash_chain: tuple[bytes, ...] = ()
    boundaries: tuple[Boundary, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProfile:
    """Conversations by name; each run starts them anew."""

    about: str  # a description for people
    conversations: Mapping[str, Callable[[], Iterator[SimulatedTurn]]]


# -- synthetic -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """Synthetic agents.

    Lengths are tokens, times seconds; those of turns vary by half around these values.
    """

    conversations: int = 40
    turns: int = 8
    systems: int = 3  # system prompts with tools; the first is used most
    system_tokens: int = 4000
    first_tokens: int = 1500  # of a conversation's first message
    turn_tokens: int = 800
    reply_tokens: int = 200
    pause: float = 8.0
    begin_within: float = 120.0  # all conversations begin within this time
    seed: int = 1

    def load(self) -> LoadProfile:
        chance = random.Random(self.seed)
        weights = [1 / (n + 1) for n in range(self.systems)]
        made = {}
        for number in range(self.conversations):
            (system,) = chance.choices(range(self.systems), weights)
            begins = chance.uniform(0, self.begin_within)
            made[f"c{number}"] = partial(self._turns, number, system, begins)
        about = (
            f"synthetic: {self.conversations} conversations of {self.turns} turns, {self.systems} system "
            f"prompts of {self.system_tokens} tokens, seed {self.seed}"
        )
        return LoadProfile(about=about, conversations=made)

    def _turns(self, number: int, system: int, begins: float) -> Iterator[SimulatedTurn]:
        chance = random.Random(f"{self.seed}/{number}")
        said = _noise(random.Random(f"{self.seed}/system/{system}"), self.system_tokens)
        chain, boundaries = [b"system %d" % system], [Boundary(len(said), BoundaryKind.HEAD)]
        for turn in range(self.turns):
            asked = self.turn_tokens if turn else self.first_tokens
            if turn:
                boundaries.append(Boundary(len(said), BoundaryKind.USER))
            prompt = said + USER_MARK + _noise(chance, _about(chance, asked))
            reply = _noise(chance, _about(chance, self.reply_tokens))
            chain.append(b"%d/%d/user" % (number, turn))
            yield SimulatedTurn(
                prompt=prompt,
                reply=reply,
                at=begins if turn == 0 else 0.0,
                pause=chance.uniform(0.5, 1.5) * self.pause,
                hash_chain=tuple(chain),
                boundaries=tuple(boundaries),
            )
            chain.append(b"%d/%d/reply" % (number, turn))
            said = prompt + reply


def _about(chance: random.Random, tokens: int) -> int:
    return max(1, round(tokens * chance.uniform(0.5, 1.5)))


def _noise(chance: random.Random, tokens: int) -> Tokens:
    return Tokens.of(chance.randbytes(tokens * WIDTH))


# -- Mooncake's traces -----------------------------------------------------------------------------------


def mooncake(lines: Iterable[bytes], *, name: str, most: int | None = None) -> LoadProfile:
    """Return at most `most` requests of a trace. Raises LineError for a line that is not a request."""
    conversations: dict[str, list[SimulatedTurn]] = {}
    ends: dict[bytes, str] = {}  # the whole blocks of a request -> its conversation
    count = 0
    requests = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    for number, line in islice(requests, most):
        turn = _mooncake_turn(line, number)
        whole = turn.hash_chain
        found = next((ends[digest] for digest in reversed(whole[1:]) if digest in ends), None)
        conversation = found or f"m{number}"
        if whole[1:]:  # a single block may be common to all
            ends[whole[-1]] = conversation
        conversations.setdefault(conversation, []).append(turn)
        count += 1
    if not count:
        raise LineError(f"{name}: holds no request")
    about = f"{name}: {count:,} requests in {len(conversations):,} conversations, by blocks of {BLOCK} tokens"
    return LoadProfile(
        about=about, conversations={name: partial(iter, turns) for name, turns in conversations.items()}
    )


def _mooncake_turn(line: bytes, number: int) -> SimulatedTurn:
    try:
        doc = orjson.loads(line)
        length, answered, blocks = int(doc["input_length"]), int(doc["output_length"]), list(doc["hash_ids"])
        at = float(doc["timestamp"]) / 1000
        ids = [int(block) for block in blocks]
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise LineError(f"line {number} is not a request in Mooncake's format: {error!r}") from None
    if not 0 < length <= len(ids) * BLOCK:
        raise LineError(f"line {number}: {len(ids)} blocks do not hold {length} tokens")
    if not abs(at) <= LATEST:  # nor is nan
        raise LineError(f"line {number}: `timestamp` is not a time in milliseconds")
    if answered > LONGEST_REPLY:
        raise LineError(f"line {number}: `output_length` is {answered}, more than {LONGEST_REPLY} tokens")
    tokens = Tokens(token for block in ids for token in _block(block)).cut(0, length)
    chain, digest = [], b""
    for block in ids[: length // BLOCK]:
        digest = blake2b(digest + b"%d" % block, digest_size=16).digest()
        chain.append(digest)
    reply = _noise(random.Random(f"reply/{number}"), max(1, answered))
    return SimulatedTurn(prompt=tokens, reply=reply, at=at, hash_chain=tuple(chain))


def _block(block: int) -> range:
    first = block % ID_STRIDE * BLOCK
    return range(first, first + BLOCK)


# -- recordings ------------------------------------------------------------------------------------------


def recorded(traces: Sequence[Trace], *, name: str) -> LoadProfile:
    """Return the chats of recordings.

    A request is sent at its recorded time, or after the answer before it in its session if that is later.
    """
    entries = [entry for entry in merged(traces) if generates(entry)]
    laid: dict[str, list[tuple[Entry, Layout]]] = {}
    for entry in entries:
        api = classify(entry.method, entry.path.partition("?")[0])
        layout = lay_out(api, entry.body or {})
        if layout is not None:
            laid.setdefault(f"{entry.client}/{entry.session}", []).append((entry, layout))
    if not laid:
        raise TraceError(f"{name}: holds no chat")
    begin = min(entry.at for entry in entries)
    count = sum(map(len, laid.values()))
    about = f"{name}: {count:,} requests in {len(laid):,} sessions, four bytes of text as one token"
    made = {session: partial(_recorded_turns, found, begin) for session, found in laid.items()}
    return LoadProfile(about=about, conversations=made)


def _recorded_turns(found: Sequence[tuple[Entry, Layout]], begin: float) -> Iterator[SimulatedTurn]:
    following: list[Layout | None] = [*(layout for _, layout in found[1:]), None]
    for (entry, layout), after in zip(found, following, strict=True):
        yield _recorded_turn(entry.at - begin, layout, after)


def _recorded_turn(at: float, layout: Layout, after: Layout | None) -> SimulatedTurn:
    said = _bytes_as_tokens(orjson.dumps(layout.tools)) if layout.tools else Tokens()
    lead = layout.lead
    digest = blake2b(said.packed, digest_size=16).digest()
    chain, boundaries = [], []
    for number, message in enumerate(layout.messages):
        if number >= lead:
            if number == lead:
                chain.append(digest)
                boundaries.append(Boundary(len(said), BoundaryKind.HEAD))
            elif message.role is Role.USER:
                boundaries.append(Boundary(len(said), BoundaryKind.USER))
        tokens = _message_as_tokens(message)
        digest = blake2b(digest + tokens.packed, digest_size=16).digest()
        if number >= lead:
            chain.append(digest)
        said += tokens
    return SimulatedTurn(
        prompt=said,
        reply=_reply_in(after, len(layout.messages)),
        at=at,
        hash_chain=tuple(chain),
        boundaries=tuple(boundaries),
    )


def _reply_in(after: Layout | None, index: int) -> Tokens:
    """Return the reply as the next request sends it back; if none does, tokens that occur nowhere else."""
    if after is not None and len(after.messages) > index and after.messages[index].role is Role.ASSISTANT:
        return _message_as_tokens(after.messages[index])
    return Tokens(range(-GUESSED_REPLY - 1, -1))


def _message_as_tokens(message: Message) -> Tokens:
    parts = [piece.text for piece in message.pieces()]
    parts += [f"{call.name} {_as_text(call.arguments)}" for call in message.calls]
    content = "\n".join(parts).encode("utf-8", "replace") + b"".join(message.media)
    mark = USER_MARK if message.role is Role.USER else Tokens([2])
    return mark + _bytes_as_tokens(content)


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()


def _bytes_as_tokens(content: bytes) -> Tokens:
    return Tokens.of(content + b" " * (-len(content) % WIDTH))


# -- files -----------------------------------------------------------------------------------------------


def from_files(paths: Sequence[Path], *, most: int | None = None) -> LoadProfile:
    """Read recordings, or one Mooncake trace. Raises TraceError, LineError."""
    if len(paths) == 1 and _is_mooncake(paths[0]):
        with paths[0].open("rb") as file:
            return mooncake(file, name=paths[0].name, most=most)
    return recorded([read(path) for path in paths], name=", ".join(path.name for path in paths))


def _is_mooncake(path: Path) -> bool:
    """Whether the first line is one of a Mooncake trace."""
    if path.suffix == ".xz":
        return False
    try:
        with path.open("rb") as file:
            first = file.readline()
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    try:
        doc = orjson.loads(first)
    except orjson.JSONDecodeError:
        return False
    return isinstance(doc, dict) and "hash_ids" in doc
