"""Names of programs and conversations. Every view, also the log, shows the same name.

A program is known by the first words of its own system text, else by its headers: a User-Agent may belong to
a library that many programs use, and some programs send the User-Agent of another. The words are those of
published programs, recorded from real clients.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any, Final

from slotkeeper.conversation.layout import Conversation, Layout, Role, Section, bare, says
from slotkeeper.conversation.phrases import EXAMPLES, FILES, SUMMARIZED, TITLE_ASKED

UNKNOWN: Final = "unknown client"
OPEN_WEBUI: Final = "Open WebUI"
OPENING: Final = 240  # characters of a text in which a program says who it is
TEXTS: Final = 4  # system texts that are searched: the first may be a billing header
LONGEST_PRODUCT: Final = 24  # characters of a product name that is in no table
REMEMBERED: Final = 1024  # clients

# The start of a User-Agent, in lower case, and what people call the program.
PROGRAMS: Final[Mapping[str, str]] = {
    "opencode/": "opencode",
    "codex": "codex",  # codex_exec, codex_cli_rs, codex-tui
    "claude-cli/": "claude-cli",
    "claude-code/": "claude-cli",
    "qwencode/": "QwenCode",
    "geminicli/": "gemini-cli",
    "kimicli/": "kimi",
    "kimi-cli/": "kimi",
    "kimi-code": "kimi",
    "mistral-vibe/": "vibe",
    "vibe/": "vibe",
    "aider/": "aider",
    "cline/": "cline",
    "roocode/": "Roo Code",
    "kilo-code/": "Kilo Code",
    "pi/": "pi",
    "pi-coding-agent/": "pi",
    "open webui": OPEN_WEBUI,
    "openwebui": OPEN_WEBUI,
    "open-webui": OPEN_WEBUI,
    "githubcopilotchat/": "Copilot",
    "zed/": "Zed",
    "openhands/": "OpenHands",
    "litellm/": "LiteLLM",
}
# The start of a User-Agent that only names the library that the program uses.
LIBRARIES: Final[Mapping[str, str]] = {
    "openai/python": "openai-python",
    "asyncopenai/python": "openai-python",
    "openai/js": "openai-js",
    "anthropic/python": "anthropic-python",
    "asyncanthropic/python": "anthropic-python",
    "anthropic/js": "anthropic-js",
    "ai-sdk/": "ai-sdk",
    "python-httpx/": "httpx",
    "python-requests/": "requests",
    "python-urllib/": "urllib",
    "python/": "aiohttp",  # Python/3.12 aiohttp/3.11.11
    "curl/": "curl",
    "wget/": "wget",
    "node": "node",
    "undici": "node",
    "bun/": "bun",
    "go-http-client/": "go",
    "okhttp/": "okhttp",
    "axios/": "axios",
    "postmanruntime/": "Postman",
    "mozilla/": "browser",  # llama-server's own page among them
}
# Words near the start of a program's system text, also of its side requests.
SPOKEN: Final[Mapping[str, str]] = {
    "You are opencode": "opencode",
    "You are a coding agent running in the Codex CLI": "codex",
    "You are Codex": "codex",
    "You are Claude Code": "claude-cli",
    "You are Qwen Code": "QwenCode",
    "operating inside pi": "pi",
    "You are Cline": "cline",
    "You are Roo": "Roo Code",
    "You are Kimi": "kimi",
    "Mistral Vibe": "vibe",
    "You help users get complex tasks done. Act directly": "vibe",
    "You are an agent in the Continue CLI": "Continue",
    "Act as an expert software developer.\nAlways use best practices": "aider",
    "You are a helpful assistant that can interact with a computer": "mini-swe-agent",
}
_JS_CLASS: Final = re.compile(r"[a-z_$]\w{0,3}/js ")  # OpenAI's library in a minified bundle: `ls/JS 5.23.2`
_PRODUCT: Final = re.compile(r"[A-Za-z][\w .+-]*")


class Agents:
    """Remembers each client's program: requests for titles and summaries do not name it themselves."""

    def __init__(self, most: int = REMEMBERED) -> None:
        self._most = most
        self._known: OrderedDict[str, str] = OrderedDict()

    def of(self, client: str, headers: Mapping[str, str], layout: Layout | None) -> str:
        """Return the program's name.

        `client` has digests of the key (else of the address) and of the User-Agent. The layout is None for
        requests that are not chats.
        """
        own_name = in_words(layout) if layout else None
        if own_name is not None:
            self._known[client] = own_name
            self._known.move_to_end(client)
            if len(self._known) > self._most:
                self._known.popitem(last=False)
            return own_name
        return self._known.get(client) or in_headers(headers)


def in_words(layout: Layout) -> str | None:
    """Return the program's name by the first words of its system text; None if unknown."""
    lead = layout.messages[: layout.lead]
    texts = [text.text for message in lead for text in message.texts if text.section is Section.SYSTEM]
    for text in texts[:TEXTS]:
        opening = text[:OPENING]
        for words, name in SPOKEN.items():
            if words in opening:
                return name
    return None


def in_headers(headers: Mapping[str, str]) -> str:
    """Return the program's name by a header that only it sends, else by the User-Agent."""
    given = {name.lower(): " ".join(value.split()) for name, value in headers.items()}
    if given.get("x-title") == OPEN_WEBUI or any(name.startswith("x-openwebui-") for name in given):
        return OPEN_WEBUI
    return _program(given.get("user-agent", "")[:OPENING])


@lru_cache(maxsize=64)  # called several times for every request
def _program(user_agent: str) -> str:
    """Return the program's name by a User-Agent."""
    lower = user_agent.lower()
    for start, name in (*PROGRAMS.items(), *LIBRARIES.items()):
        if lower.startswith(start):
            return name
    if _JS_CLASS.match(lower):
        return LIBRARIES["openai/js"]
    product = _PRODUCT.match(user_agent.partition("/")[0])
    return (product[0][:LONGEST_PRODUCT].strip() if product else "") or UNKNOWN


# -- conversations ---------------------------------------------------------------------------------------

LONGEST: Final = 60  # characters
LOOKED_AT: Final = 4000  # characters of an answer that are searched
LINE: Final = 400  # characters of the line that holds the title
_THOUGHT: Final = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_LABEL: Final = re.compile(r"(?:#+ *|[-*] +|\**title\** *: *)+", re.IGNORECASE)
_QUOTES: Final = "\"'`*“”„«» "


def title_in(reply: Mapping[str, Any]) -> str:
    """Return the title in an assistant's message in chat format; empty if there is none.

    The message is either a JSON object with a `title`, or its first line of text is the title.
    """
    content = reply.get("content")
    if not isinstance(content, str):
        return ""
    text = _THOUGHT.sub("", content[:LOOKED_AT])
    title = _in_json(text)
    if title is None:
        title = next((line for line in map(squeezed, text.splitlines()) if line), "")
    title = _LABEL.sub("", squeezed(title)[:LINE], count=1).strip(_QUOTES)
    return title if len(title) <= LONGEST else title[: LONGEST - 1].rstrip() + "…"


def squeezed(text: str) -> str:
    """Return the text in one line, without unprintable characters and surrounding quotes."""
    seen = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(seen.split()).strip(_QUOTES)


def _in_json(text: str) -> str | None:
    """Return the `title` of a JSON object in the text, empty if it has none; None if there is no object."""
    start, end = text.find("{"), text.rfind("}")
    if not 0 <= start < end:
        return None
    try:
        doc = json.loads(text[start : end + 1])
    except (ValueError, RecursionError):
        return None
    title = doc.get("title") if isinstance(doc, dict) else None
    return title if isinstance(title, str) else ""


# -- names -----------------------------------------------------------------------------------------------

WORDS: Final = 48  # characters of a task that are kept
TELLING: Final = 12  # characters: a text that contains at least so many of a task is about that task
TASKS: Final = 8  # user messages that are searched for the task: a program may have written the first
SOUGHT: Final = 2**18  # characters that are searched for the task; each text counts TEXT in addition
TEXT: Final = 64
TITLES: Final = 64  # titles that are kept for conversations that begin later
LOOKED_IN: Final = 16_384  # characters that are kept of the request for such a title
NOT_A_TASK: Final = (*FILES, *SUMMARIZED, *EXAMPLES)
KEPT: Final = 4096  # names, as many as there are conversations


@dataclass(slots=True, eq=False)
class Name:
    """The name of one conversation. All its requests share it: a title that comes later names all of them."""

    agent: str
    conversation: int | None = None
    given: str | None = None  # by X-Slotkeeper-Conversation
    handle: str = ""  # its name in answers where the client gave none: random, so that it reveals nothing
    title: str = ""
    task: str = ""
    began: float | None = None  # seconds, of its first request

    def __str__(self) -> str:
        return f"{self._who}: {self.words}" if self.words else self._who

    @property
    def without_text(self) -> str:
        """The name without words of a prompt or an answer, for the log."""
        return f"{self._who}: {self.given}" if self.given else self._who

    @property
    def _who(self) -> str:
        return self.agent if self.conversation is None else f"{self.agent} #{self.conversation}"

    @property
    def words(self) -> str:
        """What the conversation is about; empty if unknown."""
        return self.given or self.title or self.task


class Naming:
    """Gives names to conversations. `text`: whether words of prompts may be kept."""

    def __init__(self, *, text: bool = False) -> None:
        self._text = text
        self._agents = Agents()
        self._names: OrderedDict[int, tuple[str, Name]] = OrderedDict()  # by conversation, with its client
        self._titles: deque[tuple[str, str, str]] = deque(maxlen=TITLES)  # client, text it is about, title

    def coming(
        self,
        client: str,
        headers: Mapping[str, str],
        layout: Layout | None,
        *,
        before: int | None = None,
        given: str | None = None,
        now: float = 0.0,
    ) -> Name:
        """Return the name of a request that is not in a conversation yet.

        It probably continues the conversation with the number `before`.
        """
        agent = self._agents.of(client, headers, layout)
        name = None if before is None else self._known(client, before)
        if name is None:
            name = Name(agent, began=now)
            self._describe(client, name, layout)
        name.given = given or name.given
        return name

    def name(
        self,
        client: str,
        headers: Mapping[str, str],
        conversation: Conversation,
        *,
        coming: Name | None = None,
        given: str | None = None,
        now: float = 0.0,
    ) -> Name:
        """Return the name of a conversation's newest request, which had the name `coming` until now."""
        agent = self._agents.of(client, headers, conversation.received)
        name = self._known(client, conversation.number)
        if name is None:
            own = coming is not None and coming.conversation is None
            name = coming if coming and own else Name(agent, began=now)
            name.conversation = conversation.number
            self._keep(client, name)
        name.agent, name.given = agent, given or name.given
        if conversation.aside:
            name.task = name.title = ""
        else:
            self._describe(client, name, conversation.received)
        return name

    def answered(self, client: str, asked: Layout, reply: Mapping[str, Any]) -> None:
        """Read a request's answer: if it is a title, name the conversation after it."""
        if not self._text or not asks_for_title(asked):
            return
        title = title_in(reply)
        if title:
            what = squeezed(" ".join(_said(asked))[:SOUGHT])
            self._titles.append((client, what[:LOOKED_IN], title))
            for whose, name in reversed(self._names.values()):
                if whose == client and _about(what, name):
                    name.title = title
                    return

    def _describe(self, client: str, name: Name, layout: Layout | None) -> None:
        """Set the task to its first words, and the title if it is known already."""
        if self._text and layout and not name.task and not asks_for_title(layout):
            name.task = task_of(layout)
            self._find_title(client, name)

    def _known(self, client: str, number: int) -> Name | None:
        whose, name = self._names.get(number, ("", None))
        return name if whose == client else None

    def _keep(self, client: str, name: Name) -> None:
        if name.conversation is not None:
            self._names[name.conversation] = (client, name)
        if len(self._names) > KEPT:
            self._names.popitem(last=False)

    def _find_title(self, client: str, name: Name) -> None:
        """Look for a title that came earlier: an agent may ask for one before it sends the task."""
        for whose, what, title in reversed(self._titles):
            if whose == client and _about(what, name):
                name.title = title
                return


def asks_for_title(layout: Layout) -> bool:
    asking = (message for message in layout.messages if message.role in {Role.SYSTEM, Role.USER})
    return any(says(message, TITLE_ASKED) for message in asking)


def task_of(layout: Layout) -> str:
    """Return the first words that a person seems to have written; empty if there are none."""
    for text in _tasks(layout):
        words = squeezed(text[:LOOKED_IN])
        if words:
            return shortened(words)
    return ""


def shortened(words: str) -> str:
    """Return the text cut to WORDS characters, if possible at the end of a word."""
    if len(words) <= WORDS:
        return words
    cut = words[: WORDS - 1]
    return (cut.rpartition(" ")[0] if " " in cut[WORDS // 2 :] else cut).rstrip(" ,;:") + "…"


def _tasks(layout: Layout) -> Iterator[str]:
    users = [message for message in layout.messages if message.role is Role.USER]
    spoken = (m.texts for m in users[:TASKS] if not says(m, NOT_A_TASK))
    left = SOUGHT
    for text in chain.from_iterable(spoken):
        if left <= 0:
            return
        if text.section is Section.USER:
            yield bare(replace(text, text=text.text[:left]))
        left -= TEXT + len(text.text)


def _said(layout: Layout) -> Iterator[str]:
    for message in layout.messages:
        if message.role is Role.USER:
            yield from (text.text for text in message.texts)


def _about(what: str, name: Name) -> bool:
    """Whether the title that was asked for with the text `what` belongs to this conversation."""
    task = name.task.removesuffix("…")
    return len(task) >= TELLING and task in what
