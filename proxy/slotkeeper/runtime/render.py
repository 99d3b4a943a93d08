"""The exact prompt of a request, the beginning of the next turn's prompt, and the prompt's boundaries.

The markers of the engine's template give most boundaries, in a fraction of a millisecond. Other boundaries
need further renderings of the chat: one if system text is inside a user message, two if the template's family
is unknown. For a long last message its last lines are tokenized again, each with all the text after it.
"""

from __future__ import annotations

import json
from asyncio import gather
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Generic, NamedTuple, TypeVar

from slotkeeper.api.answers.echo import (
    OPENINGS,
    Arguments,
    Habit,
    follows,
    gleaned,
    guesses,
    judged,
    learnt,
    next_turns,
    returnable,
    texts,
    thoughts,
    trail,
    usual,
    words,
)
from slotkeeper.api.document import Doc, rows, text
from slotkeeper.api.head import Api
from slotkeeper.api.request import Ask
from slotkeeper.engine.answers import EngineError, EngineGoneError
from slotkeeper.observe.log import get_logger, sayable
from slotkeeper.runtime.link import EngineLink
from slotkeeper.scheduler.prompts.tokens import (
    UNKNOWN,
    Boundary,
    BoundaryKind,
    Markers,
    Tokens,
    begins,
    boundaries,
    endings,
    last_message,
    prompt_end,
)
from slotkeeper.scheduler.slots.engine_model import checkpoints_last
from slotkeeper.vocab.tokenizer import TokenizeError

# ValueError and TokenizeError: a prompt that the tokenizer refuses (invalid ids, several prompts).
RENDER_FAILURES: Final = (EngineError, EngineGoneError, TokenizeError, ValueError)

Render = Callable[[Doc, Mapping[str, str]], Awaitable[Tokens]]  # `EngineLink.render_chat`


LATEST_PROMPTS_CHARACTERS: Final = 4 << 20  # of all together; their messages take as much again
LONG_CHAT_BYTES: Final = 16 << 10  # of a request: below, the whole chat is rendered as quickly as a part
# How a chat asks for tools without naming one: then all tools but one can be left out.
UNNAMED_CHOICES: Final = ("auto", "none", "required", None)


class Rendered(NamedTuple):
    """The text of a chat, and whether only its end was rendered."""

    text: str
    pieced: bool


@dataclass(slots=True)
class TurnRenderer:
    """Renders the chats of one turn, each once: the prompt, and chats that add messages to it.

    The engine takes tens of milliseconds to render a long chat, nearly all of which stays the same when
    messages are added. So only its last messages are rendered, with the new ones and without them; what
    differs is put behind the text that is known. Both renderings must agree with that text, or the whole chat
    is rendered. If the engine counts other tokens in a prompt than its text has, parts are rendered no more.
    """

    link: EngineLink
    before: TurnRenderer | None = None  # of the turn before
    chat: Doc | None = None  # of the prompt; None: it is short, or was not rendered here
    text: str = ""  # of the prompt, as the template renders it
    pieced: bool = False  # whether only its end was rendered
    _losses: int = field(init=False)
    _done: list[tuple[Doc, Tokens]] = field(default_factory=list)
    _ends: dict[int, str] = field(default_factory=dict)  # the last messages of `chat`, by their number

    def __post_init__(self) -> None:
        self._losses = self.link.losses

    async def prompt(self, chat: Doc, auth: Mapping[str, str]) -> Tokens:
        """Render the prompt of a long chat. Raises what `EngineLink.render_chat` raises."""
        before, self.before = self.before, None
        found = await before.longer(chat, auth) if before and not self.link.dated else None
        self.text, self.pieced = found or Rendered(await self.link.chat_text(chat, auth), pieced=False)
        self.chat = chat
        return await self.link.chat_tokens(self.text, chat, auth)

    async def __call__(self, chat: Doc, auth: Mapping[str, str]) -> Tokens:
        """Render a chat whole or in part. Raises what `EngineLink.render_chat` raises."""
        for done, tokens in self._done:
            if done == chat:  # quick: their messages are the same objects
                return tokens
        link, found = self.link, await self.longer(chat, auth)
        rendering = link.chat_tokens(found.text, chat, auth) if found else link.render_chat(chat, auth)
        self._done.append((chat, tokens := await rendering))
        return tokens

    def ends(self) -> None:
        """Forget all tokens: the turn has ended."""
        self._done.clear()

    async def longer(self, chat: Doc, auth: Mapping[str, str]) -> Rendered | None:
        """Return the text of a chat that adds messages to the prompt; None: it must be rendered whole.

        Of each kind of additions, the first is also rendered whole, and compared.
        """
        link = self.link
        if self.chat is None or link.losses != self._losses:
            return None
        if (short := shortened(self.chat, chat, len(self.text))) is None:
            return None
        added = chat["messages"][len(self.chat["messages"]) :]
        kind = (text(added[-1], "role") == "user", bool(rows(added[0].get("tool_calls"))))
        known = link.renders_parts.get(kind)
        found = None if known is False else await self._pieced(short, added, auth)
        if known is None:
            whole = await link.chat_text(chat, auth)
            link.renders_parts[kind] = found == whole
            return Rendered(whole, pieced=False)
        if found is None:
            link.renders_parts[kind] = False
            return None
        return Rendered(found, pieced=True)

    async def _pieced(self, short: Doc, added: Sequence[Doc], auth: Mapping[str, str]) -> str | None:
        kept = short["messages"]
        try:
            before = self._ends.get(len(kept)) or await self.link.chat_text(short, auth)
            self._ends[len(kept)] = before
            longer = await self.link.chat_text({**short, "messages": [*kept, *added]}, auth)
        except EngineError:  # the template wants a system message, or the like
            return None
        return spliced(self.text, before, longer, last=ending(kept[-1]))


class LatestPrompts:
    """The renderers of the latest long prompts, from which the next turns are rendered."""

    def __init__(self) -> None:
        self._renderers: OrderedDict[bytes, TurnRenderer] = OrderedDict()  # by the digest of all messages
        self._characters = 0

    def renderer(self, link: EngineLink, ask: Ask) -> TurnRenderer:
        """Return a new renderer, which knows the turn before if that was rendered for this engine."""
        earlier = (self._renderers.get(digest) for digest in ask.hash_chain[-2:0:-1])
        before = next(filter(None, earlier), None)
        return TurnRenderer(link, before if before and before.link is link else None)

    def keep(self, ask: Ask, renderer: TurnRenderer) -> None:
        if renderer.chat is None or not ask.hash_chain:
            return
        key = ask.hash_chain[-1]
        self._characters -= len(replaced.text) if (replaced := self._renderers.pop(key, None)) else 0
        self._renderers[key] = renderer
        self._characters += len(renderer.text)
        while self._characters > LATEST_PROMPTS_CHARACTERS:
            _, oldest = self._renderers.popitem(last=False)
            self._characters -= len(oldest.text)


def shortened(chat: Doc, longer: Doc, size: int) -> Doc | None:
    """Return the part of a chat to which a template adds the same text as to the whole chat.

    A user message may change how the messages since the last one are rendered (reasoning is left out), so all
    of these are kept; if only calls and their results are added, the last ones are enough. Templates show
    tools in one place, so one tool is enough. None: `longer` is not `chat` with more messages, or most of its
    text, of `size` characters as rendered, would have to be kept.
    """
    messages, later = chat["messages"], longer["messages"]
    added = later[len(messages) :]
    roles = [text(message, "role") for message in messages]
    asked = max((n for n, role in enumerate(roles) if role == "user"), default=None)
    if (
        not added
        or later[: len(messages)] != messages  # quick: they are the same objects
        or any(chat.get(name) != longer.get(name) for name in {*chat, *longer} - {"messages"})
        or asked is None
        or roles[-1] == "assistant"  # the reply continues it
        or not ending(messages[-1])
    ):
        return None
    kept = messages[asked:]
    if all(text(message, "role") == "tool" or message.get("tool_calls") for message in added):
        called = [at for at in range(asked, len(roles)) if roles[at] == "assistant"]
        kept = [messages[asked], *messages[called[-1] :]] if called else kept
    if 2 * sum(len(part) for message in kept for part in texts(message)) > size:
        return None
    tools = rows(chat.get("tools"))
    fewer = {"tools": tools[:1]} if tools and chat.get("tool_choice") in UNNAMED_CHOICES else {}
    return {**chat, **fewer, "messages": list(kept)}


def ending(message: Doc) -> str:
    """Return the text with which a message ends."""
    return next((part.strip() for part in reversed(texts(message)) if part.strip()), "")


def spliced(whole: str, before: str, longer: str, *, last: str) -> str | None:
    """Return what `whole` becomes by the change that makes `longer` of `before`, the end of the same chat.

    None if the change does not fall into the common end of `whole` and `before`, or if that does not contain
    text of the `last` message, plain or as JSON: then the template renders the end of a chat otherwise.
    """
    size = len(before)
    # the shortest beginning of `before` behind which both are equal
    end = bisect_left(range(size), True, key=lambda at: whole.endswith(before[at:]))
    head = before[:end]
    shown = max(before.rfind(last), before.rfind(json.dumps(last, ensure_ascii=False)[1:-1]))
    if shown < len(head) or not longer.startswith(head):
        return None
    return whole[: len(whole) - (size - end)] + longer[end:]


def after(reply: Doc) -> list[Doc]:
    """Return messages to put after a reply so that the template renders it as history.

    After a tool's answer the template keeps the reasoning as it was sampled; after a user's message it may
    strip it. They are those of `next_turns`, where that is possible.
    """
    if calls := rows(reply.get("tool_calls")):
        return [{"role": "tool", "tool_call_id": text(call, "id"), "content": OPENINGS[0]} for call in calls]
    if reply.get("reasoning_content"):
        return [{"role": "tool", "tool_call_id": OPENINGS[0], "content": OPENINGS[0]}]
    return [{"role": "user", "content": OPENINGS[0]}]


async def prompt_of(
    link: EngineLink, ask: Ask, auth: Mapping[str, str], render: TurnRenderer | None = None
) -> Tokens | None:
    """Return the token ids that the engine will evaluate; None if they cannot be known (audio, infill).

    `render` renders a long chat, and keeps its text. Raises EngineError for a body that the engine's template
    refuses, EngineGoneError without an engine.
    """
    if ask.chat is not None:
        return await (render.prompt if render else link.render_chat)(ask.chat, auth)
    if ask.prompt is not None:
        return await link.render_prompt(ask.prompt, auth)
    return None


async def with_reply(
    link: EngineLink,
    ask: Ask,
    prompt: Tokens,
    reply: Doc,
    *,
    generated: int,
    auth: Mapping[str, str],
    render: Render | None = None,
) -> Tokens | None:
    """Return the ids of prompt and reply that the slot holds: all but the last sampled token.

    They come from rendering the conversation one turn further. None if that contradicts the engine's count
    of `generated` tokens: then the reply does not tokenize as it was sampled.
    """
    total = len(prompt) + max(0, generated - 1)
    sampled = await link.render_text(str(reply.get("content") or ""), auth)
    # All sampled tokens, or all but the one that ended the turn.
    whole = len(sampled) in (generated, generated - 1)
    if ask.chat is None:
        return (prompt + sampled).cut(0, total) if whole else None
    chat = {**ask.chat, "messages": [*ask.chat["messages"], reply, *after(reply)]}
    rendered = await (render or link.render_chat)(chat, auth)
    if rendered.lcp(prompt) < len(prompt):
        return None
    closed = link.end_of_turn in rendered.cut(total, total + 2).ids()
    return rendered.cut(0, total) if whole or closed else None


# -- boundaries ------------------------------------------------------------------------------------------

SHORTEST: Final = 512  # tokens: for a shorter prompt, reuse saves less than another rendering costs
LEADING: Final = frozenset({"system", "developer"})
OTHER: Final[Doc] = {"role": "user", "content": "Zqx"}  # hardly any message begins like this

log = get_logger(__name__)


async def boundaries_of(
    link: EngineLink, ask: Ask, prompt: Tokens, auth: Mapping[str, str]
) -> tuple[Boundary, ...]:
    """Return the prompt's boundaries. Errors of the engine only leave boundaries out."""
    markers = link.traits.markers if link.traits else UNKNOWN
    if ask.chat is None:
        return boundaries(prompt, markers)
    rendered: list[Boundary] = []
    if len(prompt) >= SHORTEST:
        rendered = await _tried(_rendered(link, ask.chat, prompt, markers, auth))
    found = boundaries(prompt, markers, rendered)
    if link.traits and checkpoints_last(link.traits):
        lines = await _tried(_lines(link, ask.chat, prompt, found, auth))
        return tuple(sorted((*found, *lines)))
    return found


async def _tried(looking: Awaitable[list[Boundary]]) -> list[Boundary]:
    try:
        return await looking
    except RENDER_FAILURES as error:
        log.debug("boundaries_not_rendered", error=sayable(error))
        return []


async def _rendered(
    link: EngineLink, chat: Doc, prompt: Tokens, markers: Markers, auth: Mapping[str, str]
) -> list[Boundary]:
    """Return the boundaries that need rendering: where a prompt with another user message diverges.

    This is where the message's text begins, or a token or two later if both texts begin alike.
    """
    if markers.user and not markers.lead_inside:
        return []
    messages = chat["messages"]
    roles = [text(message, "role") for message in messages]
    lead = next((n for n, role in enumerate(roles) if role not in LEADING), len(roles))
    found = [Boundary(await _divergence_at(link, chat, messages[:lead], prompt, auth), BoundaryKind.HEAD)]
    last = max((n for n, role in enumerate(roles) if role == "user"), default=lead)
    if not markers.user and last > lead:
        found.append(
            Boundary(await _divergence_at(link, chat, messages[:last], prompt, auth), BoundaryKind.USER)
        )
    return found


async def _lines(
    link: EngineLink, chat: Doc, prompt: Tokens, found: Sequence[Boundary], auth: Mapping[str, str]
) -> list[Boundary]:
    """Return the tokens at which the last lines of a long last user message begin."""
    message, last = last_message(found, len(prompt)), chat["messages"][-1:]
    if message is None or not last or text(last[0], "role") != "user":
        return []
    ends = endings(words(last[0]))
    ids = await gather(*(link.render_text(end, auth) for end, _ in ends))
    places = [(begins(prompt, message, end), kind) for end, (_, kind) in zip(ids, ends, strict=True)]
    return [Boundary(at, kind) for at, kind in places if at is not None]


async def _divergence_at(
    link: EngineLink, chat: Doc, before: Sequence[Doc], prompt: Tokens, auth: Mapping[str, str]
) -> int:
    """Return the length of the common prefix with a prompt in which another message follows `before`."""
    return prompt.lcp(await link.render_chat({**chat, "messages": [*before, OTHER]}, auth))


# -- the next turn ---------------------------------------------------------------------------------------
# Its prompt begins with this conversation and the reply as the client will send it back. The engine's own
# template renders it twice, with two different texts after the reply; the common prefix of both is certain.
# How a client sends replies back is learned from its requests (api/answers/echo.py), kept here within bounds.

CLIENTS: Final = 256  # habits kept, one for each client and API
REPLIES: Final = 256  # replies kept
LARGEST: Final = 64 << 10  # characters: a longer reply is not kept for comparison

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A reply that the client's next request may contain."""

    reply: Doc
    thoughts: int  # messages with reasoning in the request that this reply answered
    habit: Habit  # the client's habit in this conversation
    judged: bool = False  # a later request showed whether it came back


async def at_once() -> bool:
    """Render without waiting for a quiet moment."""
    return True


class Recent(Generic[_Key, _Value]):
    """A mapping that keeps only the `most` entries that were written last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: OrderedDict[_Key, _Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: _Key) -> _Value | None:
        return self._entries.get(key)

    def put(self, key: _Key, value: _Value) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._most:
            self._entries.popitem(last=False)


class NextTurns:
    """The habits of clients and of their conversations, and the replies that are expected back."""

    def __init__(self, clients: int = CLIENTS, replies: int = REPLIES) -> None:
        self._habits: Recent[tuple[str, Api], Habit] = Recent(clients)  # by client and API
        self._replies: Recent[tuple[str, bytes], Said] = Recent(replies)

    def __repr__(self) -> str:
        return f"<NextTurns {len(self._habits)} clients, {len(self._replies)} replies>"

    async def prefix(
        self,
        link: EngineLink,
        ask: Ask,
        reply: Doc,
        *,
        client: str,
        auth: Mapping[str, str],
        moment: Callable[[], Awaitable[bool]] = at_once,
        render: Render | None = None,
    ) -> Tokens | None:
        """Return the ids with which the next prompt will begin; None if that is not certain.

        It learns from the request and stores the reply, then waits for `moment` before it renders; None if
        `moment` returns False. Raises the errors of rendering (`RENDER_FAILURES`), and NotOurs for messages
        that are nested too deep.
        """
        habit = self.heard(client, ask, reply)
        if ask.chat is None or habit is None:
            return None
        messages = ask.chat["messages"]
        # If an assistant message is last, the reply continues it (a prefilled answer).
        if messages[-1].get("role") == "assistant" or not returnable(reply):
            return None
        possible = guesses(habit, reply, messages)
        if not possible or not await moment():
            return None
        render = render or link.render_chat
        certain = {await _shared(render, ask.chat, reply, guess, auth) for guess in possible}
        return certain.pop() if len(certain) == 1 else None

    def heard(self, client: str, ask: Ask, reply: Doc) -> Habit | None:
        """Call `follow` for a chat with one answer; None for all else. Raises NotOurs."""
        if ask.chat is None or not ask.chat["messages"] or ask.claim.copies > 1:
            return None
        return self.follow(client, ask.api, ask.chat["messages"], reply)

    def follow(self, client: str, api: Api, messages: Sequence[Doc], reply: Doc) -> Habit:
        """Learn from a client's messages and return its habit; store `reply` for its next request."""
        digests = trail(messages)
        habit = self._habits.get((client, api)) or usual(api)
        for at in range(len(messages) - 1, 0, -1):
            stored = self._replies.get((client, digests[at - 1]))
            if stored is not None and messages[at].get("role") == "assistant":
                habit = learnt(stored.habit, stored.reply, messages, at, before=stored.thoughts)
                break
        habit = gleaned(self._judged(habit, client, messages, digests), messages)
        self._habits.put((client, api), habit)
        if _size(reply) <= LARGEST:
            self._replies.put(
                (client, digests[-1]), Said(reply=reply, thoughts=thoughts(messages), habit=habit)
            )
        return habit

    def chance(self, client: str, api: Api, reply: Doc) -> float:
        """Return the chance that this client's next turn begins with `reply` as predicted."""
        return (self._habits.get((client, api)) or usual(api)).chance(reply)

    def _judged(self, habit: Habit, client: str, messages: Sequence[Doc], digests: Sequence[bytes]) -> Habit:
        """Return the habit with what these messages say about the newest reply that they should contain.

        A reply that was asked for again or left out did not come back. The replies in a history of which no
        message is known were not predicted either.
        """
        for at in range(len(messages), 0, -1):
            key = client, digests[at - 1]
            stored = self._replies.get(key)
            if stored is None:
                continue
            if not stored.judged:
                returned = not habit.puzzling and follows(stored.reply, messages[at:])
                habit = judged(habit, stored.reply, returned=returned)
                self._replies.put(key, replace(stored, judged=True, habit=stored.habit.trusting(habit)))
            return habit
        foreign = [message for message in messages if message.get("role") == "assistant"]
        return judged(habit, foreign[-1], returned=False) if foreign else habit


async def _shared(render: Render, chat: Doc, reply: Doc, habit: Habit, auth: Mapping[str, str]) -> Tokens:
    """Return the common prefix of all next prompts that this habit allows."""
    first, *others = [
        await render({**chat, "messages": messages}, auth)
        for messages in next_turns(habit, chat["messages"], reply)
    ]
    return first.cut(0, prompt_end(first.chunks, min(first.lcp(other) for other in others)))


def _size(reply: Doc) -> int:
    """Return the number of characters of text in a reply, with reasoning and arguments."""
    calls = sum(len(Arguments.SAMPLED.of(call)) for call in rows(reply.get("tool_calls")))
    return len(words(reply)) + len(text(reply, "reasoning_content")) + calls
