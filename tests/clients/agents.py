"""How to run each agent without its user: its settings, and the words of a first and a later turn.

The settings are those of docs/agents.md, with shorter answers than there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from clients.conftest import AGENTS, CONTEXT_TOKENS, VENV

Files = Mapping[str, str]
OUTPUT_TOKENS: Final = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """An agent: `first` and `later` precede the user's text."""

    package: str
    program: Path
    first: tuple[str, ...]
    later: tuple[str, ...] = ()
    files: Callable[[str], Files]  # by the server's URL, below the user's home
    variables: Mapping[str, str] = field(default_factory=dict)

    def write(self, home: Path, url: str) -> None:
        """Write the agent's settings."""
        for name, text in self.files(url).items():
            path = home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def _opencode(url: str) -> Files:
    limit = {"context": CONTEXT_TOKENS, "output": OUTPUT_TOKENS}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1"},
        "models": {"local": {"name": "local", "limit": limit}},
    }
    names = {"model": "slotkeeper/local", "small_model": "slotkeeper/local", "autoupdate": False}
    return {".config/opencode/opencode.json": json.dumps({**names, "provider": {"slotkeeper": provider}})}


def _codex(url: str) -> Files:
    top = f'model = "local"\nmodel_provider = "slotkeeper"\nmodel_context_window = {CONTEXT_TOKENS}\n'
    table = f'[model_providers.slotkeeper]\nname = "s"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
    return {".codex/config.toml": top + table}


def _pi(url: str) -> Files:
    model = {"id": "local", "contextWindow": CONTEXT_TOKENS, "maxTokens": OUTPUT_TOKENS}
    provider = {"baseUrl": f"{url}/v1", "api": "openai-completions", "apiKey": "none", "models": [model]}
    return {".pi/agent/models.json": json.dumps({"providers": {"slotkeeper": provider}})}


def _qwen_code(url: str) -> Files:
    model: dict[str, Any] = {
        "id": "local",
        "name": "local",
        "baseUrl": f"{url}/v1",
        "envKey": "SLOTKEEPER_CLIENT_KEY",
        "generationConfig": {
            "contextWindowSize": CONTEXT_TOKENS,
            "samplingParams": {"max_tokens": OUTPUT_TOKENS},
        },
    }
    settings = {
        "env": {"SLOTKEEPER_CLIENT_KEY": "none"},
        "modelProviders": {"openai": [model]},
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": "local"},
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"enableAutoUpdate": False},
    }
    return {".qwen/settings.json": json.dumps(settings)}


def _claude_code(url: str) -> Files:
    variables = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": "local",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "local",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(CONTEXT_TOKENS - OUTPUT_TOKENS),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(OUTPUT_TOKENS),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return {".claude/settings.json": json.dumps({"env": variables})}


def _cline(url: str) -> Files:
    settings = {"provider": "openai-compatible", "apiKey": "none", "model": "local", "baseUrl": f"{url}/v1"}
    provider = {"settings": settings, "updatedAt": "2026-11-30T00:00:00.000Z", "tokenSource": "manual"}
    providers = {"openai-compatible": provider}
    stored = {"version": 1, "lastUsedProvider": "openai-compatible", "providers": providers}
    return {".cline/data/settings/providers.json": json.dumps(stored)}


def _llm(url: str) -> Files:
    line = f"- model_id: local\n  model_name: local\n  api_base: {url}/v1\n"
    return {".config/io.datasette.llm/extra-openai-models.yaml": line}


PI: Final = ("--offline", "--provider", "slotkeeper", "--model", "local")
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
        first=(*PI, "-p"),
        later=(*PI, "--continue", "-p"),
        files=_pi,
    ),
    "codex": Agent(
        package="@openai/codex",
        program=AGENTS / "codex",
        first=("exec", "--skip-git-repo-check"),
        later=("exec", "resume", "--last", "--skip-git-repo-check"),
        files=_codex,
    ),
    "opencode": Agent(
        package="opencode-ai",
        program=AGENTS / "opencode",
        first=("run",),
        later=("run", "--continue"),
        files=_opencode,
        variables={"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
    ),
    "claude-code": Agent(
        package="@anthropic-ai/claude-code",
        program=AGENTS / "claude",
        first=("-p",),
        later=("--continue", "-p"),
        files=_claude_code,
    ),
    "qwen-code": Agent(
        package="@qwen-code/qwen-code",
        program=AGENTS / "qwen",
        first=("-p",),
        later=("--continue", "-p"),
        files=_qwen_code,
    ),
    "cline": Agent(
        package="cline",
        program=AGENTS / "cline",
        first=("-P", "openai-compatible"),
        files=_cline,
    ),
}
