"""Programs that start llama-server for their users: how each is recognised, and what can be had there.

Only llama-server itself, its router and llama-swap pass the routes of slots on (`EngineClient.health` tells
those three). The programs of this table answer by routes of their own; where they run a llama-server, it
listens at a port of 127.0.0.1 that changes with each load. The facts are from their sources of August 2026
(lemonade-sdk/lemonade e385039, ollama/ollama fb30760, unslothai/unsloth 015bdef) and, for LM Studio, from
its documentation and its bug reports; none of the four was run (docs/managers.md).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import orjson

from slotkeeper.engine.flags import local
from slotkeeper.values import base_of

ASK_SECONDS: Final = 2.0  # a program of this machine that is slower is not recognised
LARGEST: Final = 1 << 20  # most bytes of an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Manager:
    """One program. `asked` is a GET that changes nothing, `mark` is found in its answer and in no other's."""

    name: str
    asked: str
    mark: re.Pattern[str]
    port: int  # its usual one
    programs: tuple[str, ...]  # words of its command line, to recognise it as an engine's parent process
    had: str  # what Slotkeeper can do there
    idles: str  # what it does to an engine that it takes for idle
    do: str  # what to do instead of naming its port


LEMONADE: Final = Manager(
    name="Lemonade",
    asked="/api/v1/health",  # src/cpp/server/server.cpp, handle_health
    mark=re.compile(r'"all_models_loaded"\s*:'),
    port=13305,
    programs=("lemond", "lemonade-server", "lemonade-router"),
    had="no /props, no /completion; the llama-server behind it has all routes",
    idles="with auto_evict: erases its slots after 60 s, ends it after 300 s",
    do="let it start `slotkeeper up` in place of llama-server, and set auto_evict=false",
)
OLLAMA: Final = Manager(
    name="Ollama",
    asked="/",  # server/routes.go
    mark=re.compile(r"\AOllama is running\s*\Z"),
    port=11434,
    programs=("ollama",),
    had="no routes for slots; the llama-server behind it saves none, and may lack the chat template",
    idles="ends it after 5 minutes",
    do="serve the model's file by `slotkeeper up --model`",
)
LM_STUDIO: Final = Manager(
    name="LM Studio",
    asked="/props",  # any path that it does not know
    mark=re.compile(r'"error"\s*:\s*"Unexpected endpoint or method\.'),
    port=1234,
    programs=("lm-studio", "LM-Studio", "lms"),
    had="no routes for slots, and no llama-server behind it",
    idles="unloads the model after 60 minutes",
    do="serve the model's file by `slotkeeper up --model`",
)
UNSLOTH: Final = Manager(
    name="Unsloth Studio",
    asked="/api/health",  # studio/backend/main.py, health_check
    mark=re.compile(r'"service"\s*:\s*"Unsloth UI Backend"'),
    port=8888,
    programs=("unsloth",),
    had="no routes for slots; the llama-server behind it has all, and saves slots",
    idles="if that is set: saves its slots and ends it",
    do="let it start `slotkeeper up` in place of llama-server (LLAMA_SERVER_PATH)",
)
MANAGERS: Final = (LEMONADE, OLLAMA, LM_STUDIO, UNSLOTH)


@dataclass(frozen=True, slots=True)
class Recognised:
    """A manager that answers at a URL, and the llama-servers that it names, by URL."""

    manager: Manager
    engines: tuple[str, ...] = ()

    def sentence(self, base: str) -> str:
        """Return what it is, what can be had there, and what to change."""
        them = f" Its llama-server: {', '.join(self.engines)}." if self.engines else ""
        return f"{base} is {self.manager.name}: {self.manager.had}.{them} Instead, {self.manager.do}."


async def recognise(base: str) -> Recognised | None:
    """Return the manager that answers at this URL; None if it is another program, or none. Never raises."""
    limits = aiohttp.ClientTimeout(total=ASK_SECONDS)
    async with aiohttp.ClientSession(timeout=limits, cookie_jar=aiohttp.DummyCookieJar()) as session:
        answers = await asyncio.gather(*(_answer(session, base + each.asked) for each in MANAGERS))
    for manager, text in zip(MANAGERS, answers, strict=True):
        if manager.mark.search(text):
            return Recognised(manager, tuple(engines_in(text)) if manager is LEMONADE else ())
    return None


async def _answer(session: aiohttp.ClientSession, url: str) -> str:
    """Return the body of an answer of any status; "" without one."""
    try:
        async with session.get(url, allow_redirects=False) as response:
            return (await response.content.read(LARGEST)).decode(errors="replace")
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return ""


def engines_in(text: str) -> Iterable[str]:
    """Yield the llama-servers of this machine that Lemonade names in its answer to /api/v1/health.

    Another machine is not believed: any program may listen at Lemonade's port.
    """
    try:
        said = orjson.loads(text)
    except orjson.JSONDecodeError:
        return
    listed: Any = said.get("all_models_loaded") if isinstance(said, dict) else None
    for one in listed if isinstance(listed, list) else ():
        if isinstance(one, dict) and one.get("recipe") == "llamacpp":
            with suppress(ValueError):
                base = base_of(str(one.get("backend_url")))
                if local(urlsplit(base).hostname or ""):
                    yield base


def manager_of(command: Iterable[str]) -> Manager | None:
    """Return the manager whose command line this is, by the names of its programs."""
    names = {word.rpartition("/")[2].removesuffix(".exe") for word in command}
    return next((each for each in MANAGERS if names.intersection(each.programs)), None)
