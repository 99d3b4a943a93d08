"""Which conversation a request continues, how sure that is, and what kind of request it is.

`Conversations` has the running ones, found again by name and by content, with the last request and replies of
each. Their number and their characters are bounded; the least recently used one is dropped first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import blake2b
from itertools import count, dropwhile, islice, takewhile
from typing import Any, Final

import orjson

from slotkeeper.conversation.divergence import (
    Divergence,
    common_start,
    first_difference,
    found_again,
    json_text,
    message_pieces,
    parted,
)
from slotkeeper.conversation.layout import (
    NOWHERE,
    Conversation,
    Doc,
    Keys,
    Layout,
    Match,
    Message,
    Near,
    Notes,
    Role,
    Section,
    Text,
    Who,
    digest,
    same,
    says,
    user_says,
)
from slotkeeper.conversation.phrases import ASIDE, ASIDE_SYSTEM, SUMMARIZED, SUMMARIZER, SUMMARY_ASKED
from slotkeeper.conversation.rules.rules import common, spoken_common, unwrapped
from slotkeeper.scheduler.prompts.tokens import Tokens

DIGEST_BYTES: Final = 16
SAID: Final = "said:"  # prefix of the keys of replies without calls
PART: Final = 300  # characters counted for each message, text and call, about its overhead in bytes
FIRST_WORDS: Final = 512  # characters of a system text that identify the agent
_SILENT: Final = digest(Message(Role.USER, NOWHERE))  # of a message that holds only facts


@dataclass(frozen=True, slots=True)
class Likeness:
    """How a request compares with the last one of a conversation."""

    conversation: Conversation
    common: int  # messages after the system text that both have
    appended: bool  # the request is the old one, unchanged, with something added at its end
    whole: bool = False  # all that user and model said in it is in the request
    moved: bool = False  # the same, but system messages between came, went or moved


def opening(layout: Layout) -> int:
    """Count the messages from the system text to the first words of the user, inclusive; 0 if none.

    Before that message, a client may put its own context (a date, a folder) into a message.
    """
    for at in range(layout.lead, len(layout.messages)):
        message = layout.messages[at]
        if message.role is Role.USER and digest(message) != _SILENT:
            return at - layout.lead + 1
    return 0


def keys_of(who: Who, layout: Layout) -> Keys:
    """Return all keys by which a request's conversation is looked up, apart from its name.

    Those that conversations of one agent share are made of the system text without facts, the names of the
    tools, and the system text's first words.
    """
    lead, kin = layout.lead, list[bytes]()
    at = lead + opening(layout) - 1
    first = (_key("first", who.client, digest(layout.messages[at])),) if at >= lead else ()
    if lead:
        kin.append(_key("system", who.client, *(digest(m) for m in layout.messages[:lead])))
        words = Text(NOWHERE, layout.messages[0].said[:FIRST_WORDS], Section.SYSTEM)
        kin.append(_key("words", who.client, digest(Message(Role.SYSTEM, NOWHERE, (words,)))))
    if layout.tools:
        kin.append(_key("tools", who.client, "\0".join(sorted(map(tool_name, layout.tools)))))
    return Keys(first, tuple(kin), _reply_keys(who, layout))


def _reply_keys(who: Who, layout: Layout) -> tuple[bytes, ...]:
    """Return the keys of the newest reply, which finds a conversation if the first message was edited."""
    replies = (replied_by(message) for message in reversed(layout.messages) if _replied(message))
    return tuple(_key("reply", who.client, key) for key in next(filter(None, replies), ()))


def same_agent(old: Layout, new: Layout) -> bool:
    """Whether two requests come from one agent: the same tools in any order, and one family of system texts.

    A session id or a cache key does not show that: sub-agents, titles and memory requests share them.
    """
    return _tool_names(old) == _tool_names(new) and same_family(old, new)


def same_family(old: Layout, new: Layout) -> bool:
    """Whether both requests have no system text, or texts of one agent.

    Such texts are equal apart from facts, or their common beginning and end are at least half of the longer.
    """
    if not (old.lead and new.lead):
        return old.lead == new.lead
    if _same_system(old, new):
        return True
    one, other = ("\n".join(m.said for m in layout.messages[: layout.lead]) for layout in (old, new))
    start = common_start(one, other)
    end = common_start(one[start:][::-1], other[start:][::-1])
    return 2 * (start + end) >= max(len(one), len(other))


def more_tools(old: Layout, new: Layout) -> bool:
    """Whether tools were only added."""
    return _tool_names(old) < _tool_names(new) and same_family(old, new)


def another_agent(old: Layout, new: Layout) -> bool:
    """Whether this is another agent, not one whose tools were edited.

    That is so if half of the tools are gone or the rest are in another order.
    """
    if not same_family(old, new):
        return True
    was, now = _tool_names(old), _tool_names(new)
    left, still = ([name for name in names if name in others] for names, others in ((was, now), (now, was)))
    return bool(now) and (left != still or 2 * len(left) < max(len(was), len(now)))


def _tool_names(layout: Layout) -> Counter[str]:
    return Counter(map(tool_name, layout.tools))


def tool_name(tool: Doc) -> str:
    """Return a tool's name, or its type if it has no name."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else tool.get("name")
    return str(name or tool.get("type") or "")


def named_key(who: Who) -> tuple[bytes, ...]:
    return (_key("name", who.client, who.name),) if who.name else ()


def tools_key(who: Who) -> bytes:
    """Return the key of a client's conversations that have tools."""
    return _key("any tools", who.client)


def likeness(conversation: Conversation, who: Who, layout: Layout) -> Likeness | None:
    """Compare a request with a conversation; None if the request does not continue it."""
    other, old = conversation.who, conversation.received
    if who.client != other.client or (who.name and other.name and who.name != other.name):
        return None
    count = in_common(conversation, layout)
    whole = count == len(old.messages) - old.lead
    moved = not whole and _moved(old, layout)
    if conversation.aside and not (whole or moved):
        return None  # only its own next request continues a title or a suggestion
    found = Likeness(conversation, count, whole and _extends(old, layout), whole or moved, moved)
    if who.name and who.name == other.name:
        goes_on = moved or count >= max(1, opening(layout)) or _replaced(old, layout)
    else:
        goes_on = _by_content(found, layout)
    return found if goes_on else None


def _moved(old: Layout, new: Layout) -> bool:
    """Whether all that user and model said is still there, and only system messages between came or went."""
    if not (old.between or new.between):
        return False
    return spoken_common(old, new) == len(old.spoken) > 0


def in_common(conversation: Conversation, layout: Layout) -> int:
    """Count the first messages after the system text that both have in common.

    The newest message of the conversation may have been shortened since, if the engine's reply follows it.
    """
    old = conversation.received
    count = common(old, layout)
    last = layout.lead + count
    if old.lead + count + 1 == len(old.messages) and last + 1 < len(layout.messages):
        shortened = unwrapped(layout.messages[last], old.messages[-1])
        return count + (bool(shortened) and _brings_reply(conversation, layout, last + 1))
    return count


def _extends(old: Layout, new: Layout) -> bool:
    """Whether the new request begins with all of the old one, unchanged."""
    return first_difference(old, new) is None and json_text(old.tools) == json_text(new.tools)


def _by_content(found: Likeness, layout: Layout) -> bool:
    """Whether the contents show that a request continues a conversation.

    They share the first user message and one reply; or this is the very next request; or the same request
    again.
    """
    old = found.conversation.received
    if found.common < max(1, opening(layout)):
        return False
    if any(message.role is Role.ASSISTANT for message in layout.messages[layout.lead :][: found.common]):
        return True
    if not found.whole:
        return False
    if len(layout.messages) - layout.lead == found.common:  # the same messages again
        return found.appended and parted(old, layout) is None
    return _same_system(old, layout) or _shares_reply(found, layout)


def _shares_reply(found: Likeness, layout: Layout) -> bool:
    """Whether a reply of this conversation is in the request."""
    if found.whole and found.conversation.received.has_reply:
        return True
    return _brings_reply(found.conversation, layout, layout.lead + found.common)


def _brings_reply(conversation: Conversation, layout: Layout, at: int) -> bool:
    """Whether the first reply from message `at` on is one that the engine gave in this conversation."""
    behind = islice(layout.messages, at, None)
    reply = takewhile(_replied, dropwhile(lambda message: not _replied(message), behind))
    return any(key in conversation.replies for message in reply for key in replied_by(message))


def _replied(message: Message) -> bool:
    return message.role is Role.ASSISTANT


def _of_one_agent(found: Likeness, layout: Layout) -> bool:
    """Whether the request is of the conversation's own agent, by its text, or because it goes on with it all.

    The largest part of a system text can be context that is new in each request. A summary or a sub-agent may
    have the whole conversation too, but other tools, another system text, or words by which it is known.
    """
    old = found.conversation.received
    if same_agent(old, layout):
        return True
    if not found.whole or _tool_names(old) != _tool_names(layout) or asks_aside(layout):
        return False
    was, now = ([message.said for message in side.messages[: side.lead]] for side in (old, layout))
    return (not was or not now or found_again(was, now) > 0) and _shares_reply(found, layout)


def _replaced(old: Layout, new: Layout) -> bool:
    """Whether the history of a named conversation was replaced, for example by a summary."""
    if any(user_says(message, SUMMARIZED) for message in new.messages[new.lead :]):
        return True
    return new.has_reply and _same_system(old, new) and bool(old.lead or old.tools)


def asked_aside(layout: Layout, match: Match) -> Conversation | None:
    """Return the conversation of an agent about which a request of another head asks; None if there is none.

    At least half of the request's text is that conversation's history, with a reply; a system text that it
    shares with the agent is not counted. The request offers the agent's tools or none; some of them only if
    it asks for a summary by its own words, because then nothing is called. A request that goes on with an
    earlier side question, which was sent behind its agent's head, is asked of that one.
    """
    asked = match.before
    if asked is None or asked.aside != match.same_agent:
        return None
    if asked.aside:
        return None if same_agent(asked.sent, layout) else asked
    if not _answers_under(_tool_names(asked.sent), layout):
        return None
    history = layout.messages[layout.lead : layout.lead + match.common]
    if not any(map(_replied, history)) and not _brings_reply(asked, layout, layout.lead + match.common):
        return None
    other = layout.messages[layout.lead if same_family(asked.sent, layout) else 0 :]
    return asked if 2 * _weight(history) >= _weight(other) else None


def _answers_under(tools: Counter[str], layout: Layout) -> bool:
    """Whether a request can be answered under these tools, without a call that its client cannot take.

    /v1/messages has no way to forbid calls (T5). Claude Code offers a tool there with which it takes no call.
    """
    own = _tool_names(layout)
    if own == tools:
        return True
    if own:
        return own < tools and asks_for_summary(layout)
    return layout.no_calls is not None


def _weight(messages: Iterable[Message]) -> int:
    """Return the characters of messages, calls included."""
    return sum(len(piece.text) for message in messages for piece in message_pieces(message, 0))


def _same_system(old: Layout, new: Layout) -> bool:
    return old.lead == new.lead and all(map(same, old.messages[: old.lead], new.messages[: new.lead]))


def repeated(replies: Mapping[str, Doc], layout: Layout) -> dict[str, Doc]:
    """Return the replies that a request sends back."""
    calls = {call.id for message in layout.messages for call in message.calls}
    said = {m.said.strip() for m in layout.messages if m.role is Role.ASSISTANT}
    return {
        key: reply
        for key, reply in replies.items()
        if key in calls or (key.startswith(SAID) and str(reply.get("content")).strip() in said)
    }


def size(conversation: Conversation) -> int:
    """Return the number of characters that a conversation keeps."""
    layouts = {id(layout): layout for layout in (conversation.received, conversation.sent)}.values()
    notes = (note for notes in conversation.notes.values() for note in notes)
    kept = (len(note.text) + sum(map(len, note.told.values())) for note in notes)
    return sum(map(_size, layouts)) + sum(kept)


def reply_key(reply: Doc) -> str:
    """Return the key under which a reply without calls is kept; it is equal for equal texts."""
    return _said_key(reply.get("content"))


def replied_by(message: Message) -> tuple[str, ...]:
    """Return the keys under which the reply is kept that a message of a request is."""
    if message.calls:
        return tuple(call.id for call in message.calls)
    return (_said_key(message.said),) if message.said.strip() else ()


def _said_key(said: Any) -> str:
    return SAID + _key((said if isinstance(said, str) else json_text(said)).strip()).hex()


def reply_size(reply: Doc) -> int:
    return len(orjson.dumps(reply, default=repr))


def _size(layout: Layout) -> int:
    said = sum(len(text.text) for message in layout.messages for text in message.pieces())
    calls = sum(
        len(call.arguments) if isinstance(call.arguments, str) else len(json_text(call.arguments))
        for message in layout.messages
        for call in message.calls
    )
    parts = sum(1 + len(message.texts) + len(message.calls) for message in layout.messages)
    return said + calls + len(json_text(layout.tools)) + len(json_text(layout.options)) + PART * parts


def calls_of(reply: Mapping[str, Any]) -> Iterator[str]:
    """Yield the ids of a reply's tool calls."""
    calls = reply.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict) and isinstance(call.get("id"), str):
            yield call["id"]


def _key(*parts: str | bytes | None) -> bytes:
    hashed = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        data = part if isinstance(part, bytes) else (part or "").encode(errors="surrogatepass")
        hashed.update(b"%d:" % len(data) + data)
    return hashed.digest()


# -- the running conversations ---------------------------------------------------------------------------

CHARACTERS: Final = 128 << 20  # of text, plus 4 for each token
MOST: Final = 4096  # conversations
COMPARED: Final = 128  # the latest conversations with the same first message or name; each costs microseconds
REPLIES: Final = 256  # kept of one conversation


class Conversations:
    """The running conversations. Not thread-safe."""

    def __init__(self, characters: int = CHARACTERS, most: int = MOST) -> None:
        self._limit, self._most = characters, most
        self._lines: OrderedDict[int, Conversation] = OrderedDict()  # by `Conversation.line`, the latest last
        self._keys: dict[int, tuple[bytes, ...]] = {}  # the index keys of each line
        self._index: dict[bytes, OrderedDict[int, None]] = {}
        self._numbers = count(1)
        self.characters = 0  # kept in all

    def __len__(self) -> int:
        return len(self._lines)

    def __repr__(self) -> str:
        return f"<Conversations {len(self)} | {self.characters} of {self._limit} characters>"

    def find(self, who: Who, layout: Layout) -> Match:
        """Return the conversation that a request continues, and its other relatives."""
        found_by = keys_of(who, layout)
        return goes_on(who, layout, found_by, self.near(who, found_by))

    def near(self, who: Who, found_by: Keys, *, still: bool = False) -> Near:
        """Return all that `goes_on` chooses from; with `still`, copies that another thread may read."""
        lines = self._latest((*named_key(who), *found_by.first, *found_by.replies))
        kin = [line for line in self._latest(found_by.kin, each=2) if not line.aside]
        beside = self._latest((tools_key(who),), each=1)
        if still:
            lines, kin, beside = ([_copied(line) for line in some] for some in (lines, kin, beside))
        return Near(tuple(lines), tuple(kin), beside[0] if beside else None)

    def saw(
        self,
        match: Match,
        who: Who,
        *,
        received: Layout,
        sent: Layout,
        notes: Notes,
        now: float,
        rules: Iterable[str] = (),
    ) -> Conversation:
        """Record a request that went to the engine.

        A request that continues a conversation's end replaces that conversation's record. `rules` are the
        rules that changed the request.
        """
        aside = leads_nowhere(received, match)
        line = self._going_on(match, aside=aside)
        if line is None:
            replies = repeated(match.before.replies, received) if match.before else {}
            key = next(self._numbers)
            number = _number_of(match, received) or key
            line = Conversation(number, who, received, sent, now, replies=replies, aside=aside, line=key)
        else:
            self._unlist(line)
            line.who = Who(who.client, who.name or line.who.name)
            line.received, line.sent, line.at, line.tokens = received, sent, now, None
        line.notes, line.rules = dict(notes), tuple(rules)
        self._list(line, match.keys or keys_of(who, received))
        self._evict()
        return line

    def resent(
        self,
        line: Conversation,
        received: Layout,
        *,
        sent: Layout,
        notes: Notes,
        rules: Iterable[str],
    ) -> None:
        """Record that the request went to the engine in another form than `saw` recorded.

        Nothing changes if the conversation's next request has come since.
        """
        if line.received is received:
            line.sent, line.notes, line.rules = sent, dict(notes), tuple(rules)

    def replied(self, conversation: Conversation, reply: Doc) -> None:
        """Record the reply to the last request, in chat shape. Beyond REPLIES, the oldest are dropped."""
        replies = conversation.replies
        keys = dict.fromkeys(tuple(calls_of(reply)) or (reply_key(reply),))
        gone = [replies.pop(key) for key in keys if key in replies]
        replies.update(dict.fromkeys(keys, reply))
        gone += [replies.pop(key) for key in tuple(islice(replies, max(0, len(replies) - REPLIES)))]
        if conversation.line in self._lines:
            self._enter(conversation, [_key("reply", conversation.who.client, key) for key in keys])
            self._weigh(conversation, len(keys) * reply_size(reply) - sum(map(reply_size, gone)))
            self._evict()

    def rendered(self, conversation: Conversation, prompt: Tokens) -> None:
        """Record the prompt tokens of the conversation's last request."""
        before, conversation.tokens = conversation.tokens, prompt
        if conversation.line in self._lines:
            self._weigh(conversation, len(prompt.packed) - (len(before.packed) if before else 0))
            self._evict()

    def _going_on(self, match: Match, *, aside: bool) -> Conversation | None:
        """Return the conversation whose last request this one continues or repeats; None if there is none."""
        before = match.before
        line = self._lines.get(before.line) if before and match.same_agent else None
        if line is None or not replace(match, before=line).whole:
            return None
        return line if line.aside == aside else None

    def _latest(self, wanted: Iterable[bytes], each: int = COMPARED) -> list[Conversation]:
        seen: dict[int, None] = {}
        for key in wanted:
            seen.update(dict.fromkeys(islice(reversed(self._index.get(key, {})), each)))
        return [self._lines[number] for number in seen]

    def _list(self, line: Conversation, keys: Keys) -> None:
        tools = (tools_key(line.who),) if line.received.tools and not line.aside else ()
        kin = keys.kin if not line.aside else ()
        self._lines[line.line] = line
        self._keys[line.line] = ()
        self._enter(line, (*named_key(line.who), *keys.first, *kin, *tools, *keys.replies))
        line.size = 0
        self._weigh(line, size(line) + sum(map(reply_size, line.replies.values())))

    def _enter(self, line: Conversation, keys: Iterable[bytes]) -> None:
        self._keys[line.line] = tuple(dict.fromkeys((*self._keys[line.line], *keys)))
        for key in keys:
            self._index.setdefault(key, OrderedDict())[line.line] = None

    def _unlist(self, line: Conversation) -> None:
        del self._lines[line.line]
        for key in self._keys.pop(line.line):
            listed = self._index[key]
            listed.pop(line.line, None)
            if not listed:
                del self._index[key]
        self.characters -= line.size

    def _weigh(self, line: Conversation, characters: int) -> None:
        line.size += characters
        self.characters += characters

    def _evict(self) -> None:
        """Drop the oldest conversations beyond the bounds. The latest always stays, whatever its length."""
        while len(self._lines) > 1 and (self.characters > self._limit or len(self._lines) > self._most):
            self._unlist(next(iter(self._lines.values())))


def goes_on(who: Who, layout: Layout, found_by: Keys, near: Near) -> Match:
    """Return the conversation that a request continues: one of the same agent, if there is any.

    Callers only read the match's `before`; `Conversations.saw` finds the stored conversation by it.
    """
    alike = [like for line in near.lines if (like := likeness(line, who, layout))]
    own = [like for like in alike if _of_one_agent(like, layout)]
    # Exact continuations first. Two runs of one task are equal up to their tools' results.
    best = max(
        own or alike,
        key=lambda like: (like.appended, like.common, like.conversation.at, like.conversation.line),
        default=None,
    )
    return Match(
        before=best.conversation if best else None,
        common=best.common if best else 0,
        moved=best.moved if best else False,
        sibling=max(
            near.kin,
            key=lambda line: (same_agent(line.received, layout), line.at, line.line),
            default=None,
        ),
        beside=near.beside,
        same_agent=bool(own) or best is None,
        keys=found_by,
    )


def _copied(line: Conversation) -> Conversation:
    """Copy a conversation. Only `replies` is ever changed in place; all other fields are replaced."""
    return replace(line, replies=dict(line.replies))


def _number_of(match: Match, layout: Layout) -> int | None:
    """Return the number of the conversation that continues with more tools; None if a new one begins."""
    before = match.before
    if before is None or before.aside or match.same_agent or not more_tools(before.received, layout):
        return None
    return before.number if match.whole else None


# -- the kind of a request -------------------------------------------------------------------------------


class RequestKind(StrEnum):
    """What a request is in its conversation. Reports, logs, metrics and tests use these values."""

    COLD = "cold"  # a conversation begins; a sub-agent's as well
    TOOL_ROUND_TRIP = "tool_round_trip"  # the last request, the reply, and the results of its tools
    MAIN_TURN = "main_turn"  # the last request, the reply, and a new message of the user
    REWRITE = "rewrite"  # something changed before messages that are still there
    COMPACTION = "compaction"  # asks for a summary, or is the first request after it
    SIDE = "side"  # a title, a suggestion, a commit message
    RETRY = "retry"  # the very same request again
    BRANCH = "branch"  # goes back to an earlier message and continues from there


def kind_at(layout: Layout, match: Match, divergence: Divergence | None) -> RequestKind:
    """Return the kind of a request. Words by which clients mark a kind of request decide first.

    `divergence` is where it diverges from the request before it.
    """
    if by_words := _by_words(layout, match):
        return by_words
    before = match.before
    if before is None:
        return RequestKind.SIDE if _beside(layout, match) else RequestKind.COLD
    if (before.aside and divergence is None) or asked_aside(layout, match) is not None:
        return RequestKind.SIDE
    old = before.received
    if divergence is None or divergence.section is Section.OPTIONS:
        return _going_on(old, layout)
    if match.whole:
        return RequestKind.REWRITE  # all of its messages are still there
    return RequestKind.REWRITE if _still_there(old, layout, old.lead + match.common) else RequestKind.BRANCH


def leads_nowhere(layout: Layout, match: Match) -> bool:
    """Whether no turn continues this request: the next turn leaves out a title or a summary."""
    by_words = _by_words(layout, match)
    if by_words is not None:
        return by_words is RequestKind.SIDE or asks_for_summary(layout)
    if match.before is None:
        return _beside(layout, match)
    if asked_aside(layout, match) is not None:
        return True
    return match.before.aside and parted(match.before.received, layout) is None


def asks_for_summary(layout: Layout) -> bool:
    lead, newest = layout.messages[: layout.lead], layout.messages[layout.lead :][-1:]
    return any(says(m, SUMMARIZER) for m in lead) or any(user_says(m, SUMMARY_ASKED) for m in newest)


def asks_aside(layout: Layout) -> bool:
    """Whether the request asks for a title, a suggestion or a summary, by its own words."""
    lead, newest = layout.messages[: layout.lead], layout.messages[layout.lead :][-1:]
    aside = any(says(m, ASIDE_SYSTEM) for m in lead) or any(user_says(m, ASIDE) for m in newest)
    return aside or asks_for_summary(layout)


def _by_words(layout: Layout, match: Match) -> RequestKind | None:
    if asks_for_summary(layout):
        return RequestKind.COMPACTION
    lead = layout.messages[: layout.lead]
    new = layout.messages[layout.lead + (match.common if match.before else 0) :]
    if any(says(m, ASIDE_SYSTEM) for m in lead) or any(user_says(m, ASIDE) for m in new[-1:]):
        return RequestKind.SIDE
    # While all messages of the conversation are there, these words prove nothing: a user may also ask
    # what was done so far.
    if not match.whole and any(user_says(m, SUMMARIZED) for m in (*new, *layout.messages[-1:])):
        return RequestKind.COMPACTION
    return None


def _beside(layout: Layout, match: Match) -> bool:
    """Whether the request has none of this client's usual tools, and at most one tool (for its answer)."""
    if match.beside is None or not match.beside.received.tools:
        return False
    theirs = {tool_name(tool) for tool in match.beside.received.tools}
    return len(layout.tools) <= 1 and theirs.isdisjoint(map(tool_name, layout.tools))


def _going_on(old: Layout, new: Layout) -> RequestKind:
    if len(new.messages) == len(old.messages):
        return RequestKind.RETRY
    if len(new.messages) < len(old.messages):
        return RequestKind.BRANCH
    newest = new.messages[-1]  # of a tool, or with results and no words of the user but a program's reminder
    brings_results = newest.role is Role.TOOL or newest.answers
    return RequestKind.TOOL_ROUND_TRIP if brings_results else RequestKind.MAIN_TURN


def _still_there(old: Layout, new: Layout, at: int) -> bool:
    """Whether messages after the first that differs are found again in the new request."""
    kept = {(m.role, m.said) for m in old.messages[at + 1 :] if m.said.strip()}
    return any((m.role, m.said) in kept for m in new.messages[at:])
