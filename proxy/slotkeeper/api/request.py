"""One generation request, parsed once or refused: prompt, claims on the engine, urgency, the body to be sent.

Two tasks in one slot change a running answer silently (engine.md T1). So we first read the body as the engine
will, by the engine's own conversions, and refuse bodies that can be read in two ways.

A layout lists the texts of a body that reach its prompt, each with its path in the body. It copies and
converts nothing. Media are not part of any text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from itertools import islice
from math import isfinite
from typing import Any, Final, Self
from urllib.parse import unquote_to_bytes

import orjson

from slotkeeper.api.answers.assembling import assembles
from slotkeeper.api.document import (
    Doc,
    NotOurs,
    Prompt,
    SeenRequest,
    Shape,
    count_of,
    hash_chain,
    inserted,
    integer,
    loads,
    table,
)
from slotkeeper.api.errors import ClientFault
from slotkeeper.api.formats import anthropic, openai, responses
from slotkeeper.api.formats.openai import split
from slotkeeper.api.head import MAX_WAIT, PRIORITY, Api
from slotkeeper.api.pictures import Picture, with_names
from slotkeeper.conversation.layout import Layout, Role
from slotkeeper.scheduler.policies.adapters import Scales, scales_in
from slotkeeper.scheduler.types import NO_HINTS, Priority, RequestHints, SaidBy

__all__ = ["Ask", "NotOurs", "Prompt", "lay_out", "model_of", "parse", "read"]

LARGE: Final = 256 * 1024  # bytes; larger bodies are parsed off the event loop
BRACES: Final = 2_000  # objects; bodies with more are parsed off the event loop
MOST_VALUES: Final = 2_000_000  # commas and brackets; no model's prompt has so many
MOST_MESSAGES: Final = 20_000
MOST_DEEP: Final = 512  # nested lists and objects; no client nests a tool's schema deeper than 20
_LISTS: Final = ("messages", "input", "tools", "system")


HEAVY: Final = 8 * 2**20  # bytes; parsing a larger body here would stop the event loop for too long
MAX_STRING: Final = 16 * 2**20  # characters; to handle a longer string at all would stop the event loop
BLANKS: Final = " \n\r\t"  # templates trim these


@dataclass(frozen=True, slots=True)
class PromptSize:
    """What of a body certainly reaches its prompt: token ids, and characters other than blanks."""

    ids: int = 0
    characters: int = 0
    text: int = 0  # characters of all texts of a chat, or of a raw prompt

    def tokens(self, longest: int) -> int:
        """Return the least number of tokens, if no token of the vocabulary has more characters."""
        return self.ids + -(-self.characters // longest)


def size_of(api: Api, doc: Doc) -> PromptSize:
    """Return the size of a body's prompt. Media, tools and the model's own replies are not counted.

    A template may leave out replies, or the reasoning in them.
    """
    if api in {Api.COMPLETION, Api.COMPLETIONS}:
        prompts = split(doc.get("prompt"))
        parts = prompts if len(prompts) == 1 else []
        parts = parts[0] if parts and isinstance(parts[0], list) else parts
        texts = [part for part in parts if isinstance(part, str)]
        return PromptSize(len(parts) - len(texts), sum(map(_visible, texts)), sum(map(len, texts)))
    layout = None if "chat_template" in doc else lay_out(api, doc)
    if layout is None:
        return PromptSize()
    given = [text.text for message in layout.messages for text in message.texts]
    sure = (m.texts for m in layout.messages if m.role is not Role.ASSISTANT)
    characters = sum(_visible(text.text) for texts in sure for text in texts)
    return PromptSize(characters=characters, text=sum(map(len, given)))


def _visible(text: str) -> int:
    return len(text) - sum(map(text.count, BLANKS))


def is_large(body: bytes) -> bool:
    """Whether parsing a body takes so long that it would delay others."""
    return len(body) > LARGE or body.count(b"{") > BRACES


def check_values(body: bytes) -> None:
    """Raise ClientFault (413) if parsing the body would take more memory than a request may use."""
    if len(body) <= MOST_VALUES:
        return
    if count_of(body, b",", b"[", b"{") > MOST_VALUES:
        raise ClientFault(f"the body has more than {MOST_VALUES:,} values; send a shorter prompt", status=413)


def check_depth(body: bytes, doc: Doc) -> None:
    """Raise ClientFault if the body is nested so deeply that recursive functions could run out of stack."""
    if count_of(body, b"[", b"{") <= MOST_DEEP:
        return
    level: list[Any] = [doc]
    for _ in range(MOST_DEEP):
        inner = [value for outer in level for value in (outer.values() if type(outer) is dict else outer)]
        level = [value for value in inner if type(value) is dict or type(value) is list]
        if not level:
            return
    raise ClientFault(f"the body is nested deeper than {MOST_DEEP}; send it with less nesting")


def check_lists(doc: Doc) -> None:
    """Raise ClientFault (413) if a list has more elements than any conversation has messages."""
    for name in _LISTS:
        listed = doc.get(name)
        if isinstance(listed, list) and len(listed) > MOST_MESSAGES:
            raise ClientFault(
                f"`{name}` has {len(listed):,} elements; at most {MOST_MESSAGES:,} are taken", status=413
            )


# -- claims on the engine, and the body that is sent -----------------------------------------------------

_BOM: Final = b"\xef\xbb\xbf"  # the engine skips one at the start
_INT32: Final = 2**31
_PLAIN: Final = re.compile(r"(?:/(?:[\w.~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})*)+", re.ASCII)
_CONTROL: Final = re.compile(rb"[\x00-\x1f\x7f]")
_EMPTY: Final = re.compile(rb"\s*\}")
_DOTS: Final = frozenset({b".", b".."})


class Absent(Enum):
    """The value of a field that a body does not have. An enum stays the same in another process."""

    ABSENT = "absent"


_ABSENT: Final = Absent.ABSENT


class Doubt(StrEnum):
    """Why a request is not sent on: the engine might read it differently from us."""

    JSON = "json"
    OBJECT = "object"
    ENCODING = "encoding"
    PATH = "path"


class NotPlain(NotOurs):
    """A request that must not be sent on: the engine might read it differently.

    The message says what to do.
    """

    def __init__(self, doubt: Doubt, message: str) -> None:
        super().__init__(doubt.value)
        self.doubt = doubt
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a body claims of the engine, whatever else it says."""

    named: Any  # the value of `id_slot`, if there is one
    id_slot: int | None  # the slot that `named` chooses in the engine (T8); None: no slot
    copies: int  # number of tasks: `n` times the number of prompts
    model: Any = None  # the value of `model`
    most: int | None = None  # limit of its answer, in tokens
    lora: Scales | None = None  # LoRA scales of its own; None: it names none
    hints: RequestHints = NO_HINTS


UNNAMED: Final = Claim(named=_ABSENT, id_slot=None, copies=1)


def check_encoding(encoding: str) -> None:
    """Raise NotPlain for a Content-Encoding that would have to be decoded."""
    if encoding.strip().lower() not in {"", "identity"}:
        raise NotPlain(Doubt.ENCODING, "this Content-Encoding is not supported; send the body unencoded")


def load(body: bytes, encoding: str = "") -> Doc:
    """Return the object in `body`, which has this Content-Encoding. Raises NotPlain.

    Of two equal keys the last counts, however they are escaped, as in the engine. The engine accepts two
    things that this does not: a NUL byte after the document, and nesting deeper than 1024.
    """
    check_encoding(encoding)
    try:
        doc = (orjson.loads if len(body) <= HEAVY else loads)(body.removeprefix(_BOM))
    except orjson.JSONDecodeError as error:
        raise NotPlain(
            Doubt.JSON, f"the body is not JSON: {error}; send one object in UTF-8, with nothing after it"
        ) from error
    if not isinstance(doc, dict):
        raise NotPlain(Doubt.OBJECT, "the body is JSON, but not an object; send {...}")
    return doc


def checked(body: bytes, encoding: str = "") -> Doc:
    """Parse and check a body. Raises NotPlain, and ClientFault for values that are too large."""
    check_values(body)
    doc = load(body, encoding)
    check_depth(body, doc)
    return doc


def understood(api: Api, body: bytes, encoding: str) -> tuple[Doc, Claim]:
    """Return a body as `checked` does, and what it claims of the engine."""
    doc = checked(body, encoding)
    return doc, claim(api, doc)


def claim(api: Api, doc: Doc) -> Claim:
    """Return what `doc` claims of the engine, sent to a route of `api`."""
    named, model, most = doc.get("id_slot", _ABSENT), doc.get("model"), answer_cap(api, doc)
    hints = in_body(api, doc)
    if not api.pinnable:  # the engine ignores id_slot and n on these routes (T5)
        copies = _tasks(doc) if api is Api.TASK else 1
        return Claim(named=named, id_slot=None, copies=copies, model=model, most=most, hints=hints)
    slot = as_int(named)
    prompts = _count(doc.get("prompt")) if api in {Api.COMPLETION, Api.COMPLETIONS} else 1
    given = next((n for key in ("n_cmpl", "n") if (n := as_int(doc.get(key))) is not None), 1)
    copies, slot = max(1, given) * prompts, None if slot == -1 else slot
    lora = scales_in(doc.get("lora"))
    return Claim(named=named, id_slot=slot, copies=copies, model=model, most=most, lora=lora, hints=hints)


def placed(body: bytes, taken: Claim, slot: int | None) -> bytes:
    """Return `body` with this `id_slot`, or without a slot for None; `taken` is the body's claim.

    Nothing else changes. The field comes first. If the body has `id_slot` itself, however the key is escaped,
    ours comes last, because the engine takes the last of two equal keys.
    """
    wanted = -1 if slot is None else slot
    if taken.named is _ABSENT:
        return body if slot is None else _first(body, b'"id_slot":%d' % slot)
    if type(taken.named) is int and taken.named == wanted:
        return body
    return inserted(body, body.rindex(b"}"), b',"id_slot":%d' % wanted)


def uncached(body: bytes) -> bytes:
    """Return `body` with prompt reuse off.

    The field comes last: the engine takes the last of two equal keys.
    """
    comma = b"" if _EMPTY.match(body, body.index(b"{") + 1) else b","
    return inserted(body, body.rindex(b"}"), comma + b'"cache_prompt":false')


def plain(path: str) -> str:
    """Return the path (without its query) if every parser reads it alike. Raises NotPlain.

    The engine's HTTP library also decodes %uXXXX, and drops a tab at the end.
    """
    decoded = unquote_to_bytes(path)
    names = decoded.split(b"/")[1:]
    if (
        _PLAIN.fullmatch(path)
        and len(names) == path.count("/")
        and _DOTS.isdisjoint(names)
        and b"" not in names[:-1]
        and not _CONTROL.search(decoded)
    ):
        return path
    raise NotPlain(
        Doubt.PATH,
        f"the path {path[:80]!r} can be read in several ways; send it without %u escapes, encoded or doubled "
        "slashes, and dot segments",
    )


def is_plain(path: str) -> bool:
    """Whether every parser reads the path alike."""
    try:
        return bool(plain(path))
    except NotPlain:
        return False


def as_int(value: Any) -> int | None:
    """Return the engine's conversion of a value to a 32-bit integer; None: none, or unknown.

    Integers wrap around, other numbers lose their fraction, true is 1. Beyond 32 bits the conversion of a
    fraction is undefined.
    """
    if isinstance(value, int):
        return (value + _INT32) % (2 * _INT32) - _INT32
    if isinstance(value, float) and isfinite(value) and -_INT32 - 1 < value < _INT32:
        return int(value)
    return None


def _count(prompt: Any) -> int:
    """Return how many tasks a `prompt` becomes."""
    return max(1, len(split(prompt)))


_RANKED: Final = ("documents", "texts")  # fields of the documents of a ranking


def _tasks(doc: Doc) -> int:
    """Return the number of tasks: one per input of embeddings, one per document of rankings.

    The number may be too high, but never too low.
    """
    ranked = (len(rows) for key in _RANKED if isinstance(rows := doc.get(key), list))
    return max(_count(doc.get("input")), _count(doc.get("content")), *ranked)


def inputs_of(api: Api, doc: Doc) -> list[Prompt]:
    """Return the prompts that an engine computes for one request: the inputs of embeddings, several prompts.

    Of a ranking each document and the query. Empty if they cannot be read, or if a completion has one prompt.
    """
    query, rows = doc.get("query"), next(filter(None, map(doc.get, _RANKED)), None)
    given: list[Any] = []
    if api is not Api.TASK:
        prompts = split(doc.get("prompt"))
        given = prompts if len(prompts) > 1 else []
    elif isinstance(rows, list):
        given = [part for row in rows for part in (query, row)]
    else:
        given = split(doc.get("input", doc.get("content")))
    try:
        found = [openai.single(one)[0] for one in given]
    except NotOurs:
        return []
    return [prompt for prompt in found if prompt is not None]


def _first(body: bytes, field: bytes) -> bytes:
    start = body.index(b"{") + 1
    return inserted(body, start, field + (b"" if _EMPTY.match(body, start) else b","))


# -- the parsed request ----------------------------------------------------------------------------------

_LONGEST_MODEL: Final = 128  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One generation request."""

    api: Api
    stream: bool
    claim: Claim
    cache_prompt: bool
    chat: Doc | None  # for /apply-template, with names for images; None for raw prompts and other media
    prompt: Prompt | None  # a raw prompt; None when unknown (infill, several prompts, media)
    media: bool  # images or audio that we do not support: the token ids cannot be known
    images: tuple[Picture, ...] = ()  # the images that `chat` names
    progress: bool  # the body has `return_progress` itself
    hash_chain: tuple[bytes, ...]  # chained digests: of all before the messages, then per message
    assembles: bool = False  # the whole answer that it wants can be made from a stream


def parse(api: Api, body: bytes) -> Ask:
    """Parse the request in `body`, sent to a route that generates.

    Raises:
        NotOurs: for anything that we cannot read, and nothing else.
    """
    return read(api, load(body))


def read(api: Api, doc: Doc, taken: Claim | None = None) -> Ask:
    """Parse a body that is loaded already; `taken` is its claim, if known. Raises NotOurs."""
    shape = _shape(api, doc)
    chat, images = with_names(shape.chat) if shape.media else (shape.chat, ())
    hashed = chat or shape.chat
    pinned = api.pinnable  # /v1/messages ignores all fields that it does not know (T5)
    stream = doc.get("stream") is True
    return Ask(
        api=api,
        stream=stream,
        claim=taken or claim(api, doc),
        cache_prompt=not (pinned and doc.get("cache_prompt") is False),
        chat=chat,
        prompt=shape.prompt,
        media=shape.media and not images,
        images=images,
        progress="return_progress" in doc,
        hash_chain=() if hashed is None else hash_chain(hashed, shape.lead),
        assembles=not stream and assembles(api, doc),
    )


def chat_of(api: Api, body: bytes) -> Doc | None:
    """Return the chat that the engine makes of a body, with its media; None if it has none, or is unread."""
    with suppress(NotOurs):
        return _shape(api, load(body)).chat
    return None


def named_model(body: bytes) -> str | None:
    """Return the model that a body names, if the body is a JSON object."""
    try:
        named = load(body).get("model")
    except NotPlain:
        return None
    return named if isinstance(named, str) else None


def model_of(doc: Doc) -> str | None:
    """Return the model that a document names, if it is short and printable."""
    model = doc.get("model")
    showable = isinstance(model, str) and model.isprintable() and 0 < len(model) <= _LONGEST_MODEL
    return model if showable else None


def _shape(api: Api, doc: Doc) -> Shape:
    match api:
        case Api.CHAT:
            return openai.chat_shape(doc)
        case Api.MESSAGES:
            return anthropic.shape(doc)
        case Api.RESPONSES:
            return responses.shape(doc)
        case Api.COMPLETION | Api.COMPLETIONS:
            return openai.prompt_shape(doc)
        case Api.INFILL:
            return openai.infill(doc)
        case _:
            raise NotOurs("route")


# -- layouts: which strings of a body reach its prompt, and at which paths -------------------------------


def lay_out(api: Api, doc: Doc, before: SeenRequest | None = None) -> Layout | None:
    """Return the layout of `doc`, sent to a route of `api`; None if we cannot read it or it is not a chat.

    Messages that are equal in `before` are taken from there.
    """
    try:
        match api:
            case Api.CHAT:
                return openai.lay_out_chat(doc, before)
            case Api.MESSAGES:
                return anthropic.lay_out_messages(doc, before)
            case Api.RESPONSES:
                return responses.lay_out_items(doc, before)
            case _:
                return None
    except NotOurs:
        return None


# -- prefill progress: requested here, removed from the answer in api/answers/answer.py ----------------------

# Not Responses: its events would replace one that the client expects. Not Messages: it ignores the field.
PROGRESS_ROUTES: Final = frozenset({Api.CHAT, Api.COMPLETIONS, Api.COMPLETION})
PROGRESS: Final = b'"return_progress"'


def can_ask(ask: Ask) -> bool:
    """Whether we can ask for progress without the client noticing."""
    return ask.stream and ask.api in PROGRESS_ROUTES and ask.claim.copies == 1 and not ask.progress


def can_assemble(ask: Ask) -> bool:
    """Whether we can request a stream and assemble from it the one whole answer that the client wants."""
    return ask.assembles and ask.claim.copies == 1


def ask_for(body: bytes) -> bytes:
    """Return `body`, a JSON object that is not empty, with a request for progress as its first field."""
    return _first(body, PROGRESS + b":true")


# -- forms with files: llama-server reads no model there, llama-swap does --------------------------------

FORM_PARTS: Final = 1000  # of a form are read; llama-swap refuses more
_BOUNDARY: Final = re.compile(r'multipart/form-data\b.*?;\s*boundary=(?:"([^"]+)"|([^\s;"]+))', re.IGNORECASE)
_MODEL_FIELD: Final = re.compile(
    rb"^content-disposition:.*;\s*name=\"?model\"?\s*(?:;|$)", re.IGNORECASE | re.MULTILINE
)


def named_in_form(content_type: str, form: bytes) -> str | None:
    """Return the text field `model` of a form; None if it has none."""
    found = _BOUNDARY.search(content_type)
    if found is None:
        return None
    delimiter = b"--" + (found[1] or found[2]).encode()
    for head, value in islice(_parts_of_form(form, delimiter), FORM_PARTS):
        if _MODEL_FIELD.search(head) and b"filename" not in head:
            return form[value].decode(errors="replace")
    return None


def _parts_of_form(form: bytes, delimiter: bytes) -> Iterator[tuple[bytes, slice]]:
    """Yield the head of each part, and where its value is."""
    at = form.find(delimiter)
    while at >= 0:
        begin = at + len(delimiter)
        blank, end = form.find(b"\r\n\r\n", begin), form.find(b"\r\n" + delimiter, begin)
        if not 0 <= blank < end:
            return
        yield form[begin:blank].replace(b"\r", b""), slice(blank + 4, end)
        at = end + 2


# -- hints about urgency, and the limit of an answer ----------------------------------------------------

# A request's hints about its urgency, and the limit of its answer.
#
# | where | high | low |
# |---|---|---|
# | `X-Slotkeeper-Priority` | `high` | `low` |
# | `nvext.agent_hints` (NVIDIA Dynamo): `strict_priority`, `latency_sensitivity` | above 0 | |
# | `nvext.agent_hints`: `priority` | above 0 | below 0 |
# | `service_tier` (OpenAI) | `priority` | `flex` |
# | `priority` (vLLM) | below 0 | above 0 |
#
# The first row that gives a priority counts. One of our headers with another value is refused. Fields of a
# body may be meant for another server, so unreadable values are ignored; the engine gets the body
# unchanged. SGLang serves higher values of `priority` first unless it is configured otherwise; Anthropic's
# `service_tier` does not express urgency.


LONGEST_WAIT: Final = 86_400.0  # seconds; a longer wait is a mistake
MOST_OUTPUT: Final = 2**31  # tokens; a longer answer is a mistake
TIERS: Final = {"priority": Priority.HIGH, "flex": Priority.LOW}
OPENAI: Final = frozenset({Api.CHAT, Api.COMPLETIONS, Api.RESPONSES})  # have `service_tier` and `priority`


def in_body(api: Api, doc: Doc) -> RequestHints:
    """Return the hints from a request's body."""
    given = table(table(doc, "nvext"), "agent_hints")
    said = SaidBy.AGENT_HINTS
    priority = _by_agent(given)
    if priority is None and api in OPENAI:
        said, priority = SaidBy.BODY, _by_tier(doc)
    output = _number(given.get("osl"))
    return RequestHints(
        priority=priority or Priority.NORMAL,
        said_by=said if priority else SaidBy.NOTHING,
        output=int(output) if output is not None and 0 < output < MOST_OUTPUT else None,
        prefetch=given.get("speculative_prefill") is not False,
    )


def _by_agent(given: Doc) -> Priority | None:
    """Return the priority from Dynamo's hints, where higher numbers are more urgent; None without hints."""
    priority = _number(given.get("priority"))
    if any((_number(given.get(name)) or 0) > 0 for name in ("strict_priority", "latency_sensitivity")):
        return Priority.HIGH
    return None if priority is None else _signed(priority)


def _by_tier(doc: Doc) -> Priority | None:
    tier = doc.get("service_tier")
    if isinstance(tier, str) and tier in TIERS:
        return TIERS[tier]
    priority = _number(doc.get("priority"))
    return None if priority is None else _signed(-priority)


def _signed(number: float) -> Priority:
    return Priority.HIGH if number > 0 else Priority.LOW if number < 0 else Priority.NORMAL


def _number(value: Any) -> float | None:
    known = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    return value if known else None


# -- headers ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked:
    """The hints in our own headers; None for a header that is not there."""

    priority: Priority | None
    max_wait: float | None  # seconds

    @classmethod
    def by(cls, headers: Mapping[str, str]) -> Self:
        """Read our own headers. Raises ClientFault if a value is not valid."""
        asked, seconds = headers.get(PRIORITY), headers.get(MAX_WAIT)
        try:
            priority = None if asked is None else Priority(asked.strip().lower())
        except ValueError:
            raise ClientFault(f"{PRIORITY} has another value: say high, normal or low") from None
        try:
            wait = None if seconds is None else float(seconds)
        except ValueError:
            wait = -1.0
        if wait is not None and not 0 <= wait <= LONGEST_WAIT:
            raise ClientFault(
                f"{MAX_WAIT} has another value: say a number of seconds, {LONGEST_WAIT:.0f} at most"
            )
        return cls(priority, wait)

    def hints(self, of_body: RequestHints = NO_HINTS, *, aside: bool, since: float) -> RequestHints:
        """Return all hints of one request.

        `aside`: the request asks for a title, a suggestion or a summary. `since`: when its wait began, in
        seconds on the scheduler's clock.
        """
        if self.priority is not None:
            of_body = replace(of_body, priority=self.priority, said_by=SaidBy.HEADER)
        elif aside and of_body.said_by is SaidBy.NOTHING:
            of_body = replace(of_body, priority=Priority.LOW, said_by=SaidBy.SIDE_REQUEST)
        return of_body if self.max_wait is None else replace(of_body, start_by=since + self.max_wait)


NOTHING_ASKED: Final = Asked(None, None)


# Fields of each API that limit the answer's tokens.
CAPS: Final[dict[Api, tuple[str, ...]]] = {
    Api.CHAT: ("max_tokens", "max_completion_tokens", "n_predict"),
    Api.COMPLETIONS: ("max_tokens", "n_predict"),
    Api.COMPLETION: ("n_predict", "max_tokens"),
    Api.INFILL: ("n_predict", "max_tokens"),
    Api.RESPONSES: ("max_output_tokens", "n_predict"),
    Api.MESSAGES: ("max_tokens",),
}


def answer_cap(api: Api, doc: Doc) -> int | None:
    """Return the client's limit of the answer's tokens; None if there is no limit (-1, null)."""
    caps = (integer(doc.get(name)) for name in CAPS.get(api, ()))
    return min((cap for cap in caps if cap is not None and cap >= 0), default=None)
