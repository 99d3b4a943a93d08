"""`up`: the command line of its engine as it is printed, without secrets; its errors."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace

import pytest

from slotkeeper.app import ListenError
from slotkeeper.cli import up
from slotkeeper.cli.main import run_loop
from slotkeeper.cli.up import _needs_namespaces, _without_keys
from slotkeeper.engine.flags import EngineFlags
from slotkeeper.settings import Settings
from slotkeeper.values import UsageError

SECRET = "s3cret-of-somebody"  # noqa: S105


@pytest.mark.parametrize(
    "words",
    [
        ("--api-key", SECRET),
        (f"--api-key={SECRET}",),
        ("--api_key", SECRET),
        ("--api-key", f"{SECRET},another"),
        ("--api-key-file", f"/keys/{SECRET}"),
        (f"--api-key-file=/keys/{SECRET}",),
        ("--hf-token", SECRET),
        ("-hft", SECRET),
        (f"-hft={SECRET}",),
        ("--ssl-key-file", f"/keys/{SECRET}"),
        ("--model-url", f"https://me:{SECRET}@example.org/m.gguf"),
        ("--model-url", f"https://example.org/m.gguf?sig={SECRET}"),
        ("--some-new-flag", "hf_ABCDEFGHIJKLMNOPQRST" + SECRET.replace("-", "_")),
    ],
)
def test_no_api_key_is_printed_with_the_command_line_of_the_engine(words):
    said = _without_keys(["llama-server", "--port", "8080", *words, "-np", "2"])
    assert SECRET not in " ".join(said)
    assert SECRET.replace("-", "_") not in " ".join(said)
    assert said[:3] == ["llama-server", "--port", "8080"]
    assert said[-2:] == ["-np", "2"]
    assert len(said) == 5 + len(words)


def test_other_arguments_are_printed_unchanged():
    words = [
        "llama-server",
        "--model",
        "/models/a=b.gguf",
        "--cache-type-k",
        "q8_0",
        "-c",
        "4096",
        "--image-max-tokens",
        "5",
    ]
    assert _without_keys(words) == words


@pytest.mark.parametrize(
    ("mode", "words", "apart"),
    [
        ("auto", [], False),
        ("auto", ["--api-key", "one"], False),
        ("auto", ["--api-key", "one,two"], True),
        ("auto", ["--api-key-file", "ONE"], False),
        ("auto", ["--api-key-file", "TWO"], True),
        ("auto", ["--api-key-file", "/nowhere"], False),
        ("off", ["--api-key", "one,two"], False),
        ("key", [], True),
    ],
)
def test_an_engine_with_several_api_keys_separates_its_clients(tmp_path, mode, words, apart):
    for name, keys in (("ONE", "a\n\n"), ("TWO", "a\nb\n")):
        (tmp_path / name).write_text(keys, "utf-8")
    words = [str(tmp_path / word) if word.isupper() else word for word in words]
    assert _needs_namespaces(Settings(namespaces=mode), EngineFlags.parse(words)) is apart


def run_with(error: Exception, monkeypatch) -> int:
    """Run `up` with an engine that is not started, and with a sidecar that ends with this error."""

    async def failing(*_, **__) -> None:
        raise error

    flags = EngineFlags.parse(["--port", "1"], {})
    monkeypatch.setattr(up, "launch_plan", lambda *_, **__: SimpleNamespace(flags=flags))
    monkeypatch.setattr(up, "serve", failing)
    settings = Settings(listen="127.0.0.1:0", admin_listen="127.0.0.1:0")
    return up.up(
        settings,
        model=Path("m.gguf"),
        engine=None,
        slots=None,
        context_tokens=None,
        extra=(),
        run_loop=run_loop,
    )


def test_only_a_port_that_cannot_be_bound_is_a_usage_error(monkeypatch):
    with pytest.raises(UsageError, match="cannot listen: taken"):
        run_with(ListenError("cannot listen: taken"), monkeypatch)
    with pytest.raises(OSError, match="No space left"):
        run_with(OSError(errno.ENOSPC, "No space left on device"), monkeypatch)
