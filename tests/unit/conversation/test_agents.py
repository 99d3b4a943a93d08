"""Recognising the client program: by its texts, by its headers, and by earlier requests."""

from __future__ import annotations

from typing import Any

import pytest

from slotkeeper.api.head import Api
from slotkeeper.api.request import lay_out
from slotkeeper.conversation.naming import SPOKEN, UNKNOWN, Agents, in_headers, in_words


def chat(system: str, role: str = "system") -> Any:
    messages = [{"role": role, "content": system}, {"role": "user", "content": "Hello"}]
    return lay_out(Api.CHAT, {"messages": messages})


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("opencode/1.18.33 ai-sdk/provider-utils/4.0.23 runtime/bun/1.3.14", "opencode"),
        ("codex_exec/0.169.0 (Debian 12.0.0; x86_64) xterm (codex_exec; 0.169.0)", "codex"),
        ("claude-cli/2.1.197 (external, sdk-cli)", "claude-cli"),
        ("QwenCode/0.24.4 (linux; x64)", "QwenCode"),
        ("OpenAI/Python 2.20.0", "openai-python"),
        ("AsyncOpenAI/Python 2.14.0", "openai-python"),
        ("OpenAI/JS 6.26.0", "openai-js"),
        ("ls/JS 5.23.2", "openai-js"),
        ("Anthropic/JS 0.91.1", "anthropic-js"),
        ("ai-sdk/openai-compatible/3.0.37 ai-sdk/provider-utils/5.0.30 runtime/bun/1.3.13", "ai-sdk"),
        ("python-httpx/0.28.1", "httpx"),
        ("curl/8.5.0", "curl"),
        ("Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36", "browser"),
        ("Open WebUI (https://github.com/open-webui/open-webui)", "Open WebUI"),
        ("my-agent/3.1 (beta)", "my-agent"),
        ("  spaced\t name/1", "spaced name"),
        ("a-name-much-longer-than-anyone-would-read/1", "a-name-much-longer-than-"),
        ("<script>alert(1)</script>", UNKNOWN),
        ("", UNKNOWN),
    ],
)
def test_the_user_agent_header_gives_the_common_name_of_the_client_program(header, name):
    assert in_headers({"User-Agent": header}) == name


def test_open_webui_is_recognised_by_the_headers_that_it_adds():
    library = {"User-Agent": "Python/3.11 aiohttp/3.11.11"}
    assert in_headers(library) == "aiohttp"
    assert in_headers(library | {"x-openwebui-chat-id": "1"}) == "Open WebUI"
    assert in_headers(library | {"X-Title": "Open WebUI"}) == "Open WebUI"


def test_a_client_without_headers_is_unknown():
    assert in_headers({}) == UNKNOWN


@pytest.mark.parametrize(("words", "name"), SPOKEN.items())
@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_client_program_is_recognised_by_how_its_system_text_begins(words, name, role):
    assert in_words(chat(f"{words}, and so on.", role)) == name


def test_only_the_beginning_of_the_system_text_names_the_client_program():
    assert in_words(chat("x" * 300 + " You are Cline")) is None
    assert in_words(lay_out(Api.CHAT, {"messages": [{"role": "user", "content": "You are Cline"}]})) is None


def test_the_client_is_read_from_the_second_system_text_if_the_first_is_a_billing_header():
    doc = {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=00000;"},
            {"type": "text", "text": "You are Claude Code, Anthropic's official CLI."},
        ],
        "messages": [{"role": "user", "content": "Hello"}],
    }
    assert in_words(lay_out(Api.MESSAGES, doc)) == "claude-cli"


def test_the_system_text_outweighs_a_borrowed_user_agent_header():
    borrowed = {"User-Agent": "claude-cli/0.24.4 (external, cli)"}
    assert Agents().of("anna", borrowed, chat("You are Qwen Code, an agent.")) == "QwenCode"


def test_a_side_request_is_attributed_to_the_program_that_its_client_was_recognised_as():
    agents, library = Agents(most=1), {"User-Agent": "OpenAI/Python 2.20.0"}
    title = chat("You are a title generator.")
    assert agents.of("anna", library, title) == "openai-python"
    agents.of("anna", library, chat("Act as an expert software developer.\nAlways use best practices when"))
    assert agents.of("anna", library, title) == "aider"
    assert agents.of("anna", library, None) == "aider"
    assert agents.of("bert", library, title) == "openai-python"
    agents.of("bert", library, chat("You are Cline."))
    assert agents.of("anna", library, title) == "openai-python"  # forgotten: at most one client is remembered
