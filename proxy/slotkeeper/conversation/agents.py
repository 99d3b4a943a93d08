"""Which program asks, as people call it: by the first words of its own system text, else by its headers.

A User-Agent may be that of a library which many programs use, and some programs send that of another. The
words are those of published programs, recorded from real clients.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from slotkeeper.conversation.requests.layout import Layout, Section

UNKNOWN: Final = "unknown client"
OPEN_WEBUI: Final = "Open WebUI"
OPENING: Final = 240  # characters of a text in which a program says who it is
TEXTS: Final = 4  # system texts that are looked at: the first may be a header of billing
LONGEST: Final = 24  # characters of a name that is in no table
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
# The same of what only says which library the program uses.
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
# Words near the start of a system text, or of a side request's.
WORDS: Final[Mapping[str, str]] = {
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
_JS_CLASS: Final = re.compile(r"[a-z_$]\w{0,3}/js ")  # OpenAI's library in a bundle: `ls/JS 5.23.2`
_PRODUCT: Final = re.compile(r"[A-Za-z][\w .+-]*")


class Agents:
    """Remembers who a client turned out to be: its titles and summaries do not say it themselves."""

    def __init__(self, most: int = REMEMBERED) -> None:
        self._most = most
        self._known: OrderedDict[str, str] = OrderedDict()

    def of(self, client: str, headers: Mapping[str, str], layout: Layout | None) -> str:
        """`client` is a digest of the key and of the User-Agent; the layout is None for what is no chat."""
        said = in_words(layout) if layout else None
        if said is not None:
            self._known[client] = said
            self._known.move_to_end(client)
            if len(self._known) > self._most:
                self._known.popitem(last=False)
            return said
        return self._known.get(client) or in_headers(headers)


def in_words(layout: Layout) -> str | None:
    """By the first words of what the program itself says; None if unknown."""
    lead = layout.messages[: layout.lead]
    texts = [text.text for message in lead for text in message.texts if text.section is Section.SYSTEM]
    for text in texts[:TEXTS]:
        opening = text[:OPENING]
        for words, name in WORDS.items():
            if words in opening:
                return name
    return None


def in_headers(headers: Mapping[str, str]) -> str:
    """By a header of its own, else by the User-Agent."""
    given = {name.lower(): " ".join(value.split()) for name, value in headers.items()}
    if given.get("x-title") == OPEN_WEBUI or any(name.startswith("x-openwebui-") for name in given):
        return OPEN_WEBUI
    return _program(given.get("user-agent", "")[:OPENING])


@lru_cache(maxsize=64)  # asked several times of every request
def _program(said: str) -> str:
    """By a User-Agent."""
    lower = said.lower()
    for start, name in (*PROGRAMS.items(), *LIBRARIES.items()):
        if lower.startswith(start):
            return name
    if _JS_CLASS.match(lower):
        return LIBRARIES["openai/js"]
    product = _PRODUCT.match(said.partition("/")[0])
    return (product[0][:LONGEST].strip() if product else "") or UNKNOWN
