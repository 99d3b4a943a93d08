"""How to run each agent without its user: its settings, and the words of a first and a later turn.

The settings are those that docs/agents.md shows, with the address of the test's server.
"""

from __future__ import annotations

import json
import secrets
import shlex
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import httpx

from chaos.raw import until_async
from clients.conftest import AGENTS, AIDER, CONTEXT_TOKENS, VENV, Ended, Leg, begun, ran
from pages import blocks, commands
from programs import program
from slotkeeper.engine.child.launch import free_port

Files = Mapping[str, str]
HERE: Final = Path(__file__).parent
WORK: Final = "work"  # the folder in which an agent runs, in its user's home
PAGE: Final = "docs/agents.md"
DOCUMENTED_URL: Final = "http://127.0.0.1:8080"
OUTPUT_TOKENS: Final = 8192
PROXY_KEY: Final = f"sk-{secrets.token_hex(32)}"  # LiteLLM's proxy starts with no weaker one


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """An agent: `first` and `later` precede the user's text; `setup` lets it store settings."""

    package: str
    program: Path
    first: tuple[str, ...]
    later: tuple[str, ...]
    files: Callable[[str], Files] = lambda _: {}  # by the server's URL, below the user's home
    setup: tuple[str, ...] = ()  # the command line
    variables: Mapping[str, str] = field(default_factory=dict)
    behind: str = ""  # the package of a proxy between the agent and the server

    @property
    def row(self) -> tuple[str, str]:
        """The package in the table, and what its cases begin with."""
        return (
            (self.behind, f"{self.program.name} through its proxy, ") if self.behind else (self.package, "")
        )

    async def prepare(self, home: Path, url: str) -> None:
        """Write the agent's settings, or let it store them."""
        for name, text in self.files(url).items():
            path = home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        if self.setup:
            stored = await ran([word.replace(DOCUMENTED_URL, url) for word in self.setup], home)
            assert stored.code == 0, stored


def _documented(heading: str, language: str, more: Mapping[str, Any] | None = None) -> Callable[[str], Files]:
    """Return the file that the page shows; with `more` the agent asks no other server."""
    (block,) = [block for block in blocks(PAGE, language) if block.heading == heading]

    def files(url: str) -> Files:
        text = block.text.replace(DOCUMENTED_URL, url)
        return {block.path: json.dumps(json.loads(text) | more) if more else text}

    return files


def _documented_words(heading: str) -> list[tuple[str, ...]]:
    """Return the arguments of each command that the page shows."""
    return [tuple(shlex.split(command)[2:]) for command in commands(PAGE, heading)]


def _llm(url: str) -> Files:
    line = f"- model_id: local\n  model_name: local\n  api_base: {url}/v1\n"
    return {".config/io.datasette.llm/extra-openai-models.yaml": line}


def _aider(url: str) -> Files:
    top = f"model: openai/local\nopenai-api-base: {url}/v1\nopenai-api-key: none\n"
    limits = {"max_input_tokens": CONTEXT_TOKENS - OUTPUT_TOKENS, "max_output_tokens": OUTPUT_TOKENS}
    # Of a model that it knows it does not ask the network.
    known = {"openai/local": {**limits, "litellm_provider": "openai", "mode": "chat"}}
    return {".aider.conf.yml": top, ".aider.model.metadata.json": json.dumps(known)}


def _open_webui(url: str) -> Files:
    return {f"{WORK}/url.txt": url}


(PI,) = _documented_words("pi")
CLINE_SETUP, (*CLINE, _) = _documented_words("Cline")
QUIET_QWEN: Final = {"privacy": {"usageStatisticsEnabled": False}, "general": {"enableAutoUpdate": False}}
AIDER_WORDS: Final = (
    "--no-git",
    "--no-check-update",
    "--no-show-release-notes",
    "--no-show-model-warnings",
    "--analytics-disable",
    "--yes-always",
    "--restore-chat-history",
    "--message",
)
CLINE_WORDS: Final = (str(HERE / "cline.py"), str(AGENTS / "cline"), *CLINE)
OPEN_WEBUI: Final = (str(HERE / "open_webui.py"),)
AGENTS_BY_NAME: Final[dict[str, Agent]] = {
    "llm": Agent(
        package="llm",
        program=VENV / "llm",
        first=("-m", "local"),
        later=("-m", "local", "-c"),
        files=_llm,
        variables={"OPENAI_API_KEY": "none"},
    ),
    "pi": Agent(
        package="@earendil-works/pi-coding-agent",
        program=AGENTS / "pi",
        first=("--offline", *PI, "-p"),
        later=("--offline", *PI, "--continue", "-p"),
        files=_documented("pi", "json"),
    ),
    "codex": Agent(
        package="@openai/codex",
        program=AGENTS / "codex",
        first=("exec", "--skip-git-repo-check"),
        later=("exec", "resume", "--last", "--skip-git-repo-check"),
        files=_documented("Codex", "toml"),
    ),
    "opencode": Agent(
        package="opencode-ai",
        program=AGENTS / "opencode",
        first=("run",),
        later=("run", "--continue"),
        files=_documented("opencode", "json"),
        variables={"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
    ),
    "claude-code": Agent(
        package="@anthropic-ai/claude-code",
        program=AGENTS / "claude",
        first=("-p",),
        later=("--continue", "-p"),
        files=_documented("Claude Code", "json"),
    ),
    "qwen-code": Agent(
        package="@qwen-code/qwen-code",
        program=AGENTS / "qwen",
        first=("-p",),
        later=("--continue", "-p"),
        files=_documented("Qwen Code", "json", QUIET_QWEN),
    ),
    "cline": Agent(
        package="cline",
        program=VENV / "python",
        first=CLINE_WORDS,
        later=CLINE_WORDS,
        setup=(str(AGENTS / "cline"), *CLINE_SETUP),
    ),
    "aider": Agent(
        package="aider-chat",
        program=AIDER / "aider",
        first=AIDER_WORDS,
        later=AIDER_WORDS,
        files=_aider,
    ),
    "open-webui": Agent(
        package="open-webui",
        program=VENV / "python",
        first=OPEN_WEBUI,
        later=OPEN_WEBUI,
        files=_open_webui,
    ),
}
AGENTS_BY_NAME["pi-litellm"] = replace(
    AGENTS_BY_NAME["pi"],
    first=("--api-key", PROXY_KEY, *AGENTS_BY_NAME["pi"].first),
    later=("--api-key", PROXY_KEY, *AGENTS_BY_NAME["pi"].later),
    behind="litellm",
)


def words(agent: Agent, turn: int, task: str) -> list[str]:
    """Return the command line of a turn, from 0."""
    return [program(str(agent.program)), *(agent.later if turn else agent.first), task]


async def takes_turn(agent: Agent, home: Path, turn: int, task: str) -> Ended:
    """Let an agent take a turn, from 0, within `acting`. Raises TimeoutError."""
    return await ran(words(agent, turn, task), home, agent.variables, cwd=home / WORK)


@asynccontextmanager
async def acting(agent: Agent, leg: Leg, home: Path) -> AsyncIterator[None]:
    """Prepare an agent's settings and working folder, and run the proxy that it uses."""
    home.joinpath(WORK).mkdir(parents=True, exist_ok=True)
    if not agent.behind:
        await agent.prepare(home, leg.url)
        yield
        return
    async with _litellm(leg.url, home) as url:
        await agent.prepare(home, url)
        yield


@asynccontextmanager
async def _litellm(url: str, home: Path) -> AsyncIterator[str]:
    """Run LiteLLM's proxy; yield its URL."""
    config, port = home / "litellm.yaml", free_port()
    model = {"model": "openai/local", "api_base": f"{url}/v1", "api_key": "none"}
    config.write_text(json.dumps({"model_list": [{"model_name": "local", "litellm_params": model}]}))
    line = [str(VENV / "litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    ours = f"http://127.0.0.1:{port}"

    async def lives() -> bool:
        async with httpx.AsyncClient() as client:
            try:
                return (await client.get(f"{ours}/health/liveliness")).status_code == 200
            except httpx.HTTPError:
                return False

    with (home / "litellm.log").open("wb") as log:
        async with begun(line, home, {"LITELLM_MASTER_KEY": PROXY_KEY}, output=log.fileno()):
            await until_async(lives)
            yield ours
