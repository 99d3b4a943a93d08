"""How to run each agent without its user: its settings, and the words of a first and a later turn.

The settings are those that docs/agents.md shows, with the address of the test's server.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from clients.conftest import AGENTS, VENV
from pages import blocks, commands

Files = Mapping[str, str]
PAGE: Final = "docs/agents.md"
DOCUMENTED_URL: Final = "http://127.0.0.1:8080"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """An agent: `first` and `later` precede the user's text; `setup` lets it store settings."""

    package: str
    program: Path
    first: tuple[str, ...]
    later: tuple[str, ...] = ()
    files: Callable[[str], Files] = lambda _: {}  # by the server's URL, below the user's home
    setup: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    def setup_for(self, url: str) -> list[str]:
        return [word.replace(DOCUMENTED_URL, url) for word in self.setup]

    def write(self, home: Path, url: str) -> None:
        """Write the agent's settings."""
        for name, text in self.files(url).items():
            path = home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


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


(PI,) = _documented_words("pi")
CLINE_SETUP, (*CLINE, _) = _documented_words("Cline")
QUIET_QWEN: Final = {"privacy": {"usageStatisticsEnabled": False}, "general": {"enableAutoUpdate": False}}
AGENTS_BY_NAME: Final = {
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
        program=AGENTS / "cline",
        first=tuple(CLINE),
        setup=CLINE_SETUP,
    ),
}
