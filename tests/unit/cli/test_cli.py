"""The command line: exit codes, help that teaches, and words that go where they belong."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slotkeeper import __version__
from slotkeeper.cli.main import main
from slotkeeper.exchange.keys import KeyList
from slotkeeper.settings import Settings

COMMANDS = ("serve", "up", "demo", "doctor", "why", "top", "health", "snapshots", "keys", "replay", "lint")
NOBODY = "http://127.0.0.1:1"  # a port at which nobody listens
SLOW = {"aiohttp", "tiktoken", "uvloop", "structlog"}  # to be imported; together half of a start
LOADED = (
    "import sys; from slotkeeper.cli.main import main\n"
    f"try: main()\nfinally: print({SLOW} & sys.modules.keys())"
)


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch, tmp_path):
    for name in Settings.model_fields:
        monkeypatch.delenv(f"SLOTKEEPER_{name.upper()}", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def told(capsys):
    """Run a command line; its exit code and all that it printed, spaces and line ends made one."""

    def run(*words: str) -> tuple[int, str, str]:
        try:
            code: Any = main(list(words))
        except SystemExit as left:  # argparse
            code = left.code
        out, err = capsys.readouterr()
        return code, re.sub(r"\s+", " ", out), re.sub(r"\s+", " ", err)

    return run


@pytest.mark.parametrize("words", ["--version", "--help", f"why --admin {NOBODY}", f"top --admin {NOBODY}"])
def test_what_serves_nobody_does_not_load_what_serving_needs(words):
    ran = subprocess.run(
        [sys.executable, "-c", LOADED, *words.split()], capture_output=True, text=True, check=False
    )
    assert ran.stdout.splitlines()[-1] == "set()", ran.stderr


# -- help ----------------------------------------------------------------------------------------------


def test_version_is_that_of_the_package(told):
    assert told("--version") == (0, f"slotkeeper {__version__} ", "")


def test_help_names_every_command(told):
    code, out, _ = told("--help")
    assert code == 0
    assert [name for name in COMMANDS if f" {name} " not in out] == []


def test_without_a_command_help_is_shown_and_the_code_says_so(told):
    code, out, _ = told()
    assert code == 2
    assert "COMMAND" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_teaches(command, told):
    """What it does in a sentence, every option explained, and something to take along at the end."""
    code, out, _ = told(command, "--help")
    assert code == 0
    usage, _, rest = out.partition("[-h]")
    assert f"slotkeeper {command}" in usage
    assert re.search(r"[a-z]\. .*options:", rest), "no description"
    options = rest.partition("options: ")[2]
    explained = re.findall(r"(--[a-z-]+)(?:, (?=--no-)|(?: [A-Z][\w:.]*)? (?=[a-z`/'A-Z].))", options)
    every = set(re.findall(r"(--[a-z-]+)", rest.partition("options: ")[0]))
    assert every <= set(explained)
    assert "(default: )" not in out
    assert f"Example: slotkeeper {command}" in out
    assert re.search(r" Next: \S+ \S+", out), "what to do then is not said"


def test_help_of_serve_names_every_setting(told):
    _, out, _ = told("serve", "--help")
    missing = [name for name in Settings.model_fields if f"--{name.replace('_', '-')} " not in out]
    assert missing == []


def test_up_has_no_upstream_because_it_starts_its_engine(told):
    assert "--upstream" not in told("up", "--help")[1]
    assert told("up", "--upstream", NOBODY)[0] == 2
    assert "upstream" not in told("up", "--print-config")[1]


# -- settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["serve", "up"])
def test_print_config_shows_value_and_origin_and_starts_nothing(command, told, monkeypatch, tmp_path):
    config = tmp_path / "c.toml"
    config.write_text("drain_delay = 7.5\n", "utf-8")
    monkeypatch.setenv("SLOTKEEPER_LOG_LEVEL", "debug")
    words = ("--print-config", "--config", str(config), "--listen", "127.0.0.1:1234")
    code, out, _ = told(command, *words)
    assert code == 0
    for line in (
        "listen 127.0.0.1:1234 flag",
        "log_level debug environment",
        f"drain_delay 7.5 file {config}",
        "log_format auto default",
    ):
        assert line in out


def test_print_config_shows_no_secret_and_every_bracket(told):
    _, out, _ = told("serve", "--print-config", "--admin-token", "s3cret", "--api-prefix", "/[red]x")
    assert "s3cret" not in out
    assert "admin_token **********" in out
    assert "/[red]x" in out


def test_sizes_are_shown_as_people_write_them(told):
    assert "(default: 16GiB)" in told("serve", "--help")[1]
    code, out, _ = told("serve", "--print-config", "--hot-bytes", "1.5GiB")
    assert code == 0
    assert "hot_bytes 1536MiB flag" in out
    assert "max_body_bytes 64MiB default" in out


def test_probing_is_turned_off_by_a_flag_and_on_again_by_a_later_one(told, monkeypatch):
    assert "probe true default" in told("serve", "--print-config")[1]
    assert "probe false flag" in told("serve", "--print-config", "--no-probe")[1]
    monkeypatch.setenv("SLOTKEEPER_PROBE", "false")
    assert "probe false environment" in told("serve", "--print-config")[1]
    assert "probe true flag" in told("serve", "--print-config", "--probe")[1]


def test_several_engines_by_several_flags(told):
    _, out, _ = told("serve", "--print-config", "--upstream", "http://a:1", "--upstream", "http://b:1")
    assert "upstream http://a:1, http://b:1 flag" in out


# -- exit code 2: the user can mend it -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["nonsense"], "the commands are serve, up,"),
        (["serve", "--nonsense"], "--nonsense"),
        (["serve", "--listen", "x"], "--listen: 'x' is not HOST:PORT"),
        (["serve", "--config", "/nowhere.toml"], "--config: there is no file /nowhere.toml"),
        (["serve", "--admin-listen", ":0"], "--admin-token"),
        (["serve", "--", "-ngl", "99"], "slotkeeper up"),
        (["doctor"], "--upstream"),
        (["serve", "--hot-bytes", "plenty"], "--hot-bytes"),
        (["snapshots"], "ls,verify,rm"),
        (["snapshots", "rm"], "--all"),
        (["snapshots", "rm", "abcd", "--all"], "--all"),
        (["snapshots", "ls", "--admin", "localhost:9090"], "write http://HOST:PORT"),
        (["snapshots", "ls", "--admin", NOBODY, "--slot-dir", "/s"], "not allowed with"),
        (["snapshots", "ls", "--cold-dir", "/s"], "--slot-dir"),
        (["snapshots", "ls", "--slot-dir", "/nowhere"], "no sidecar has ever kept snapshots in /nowhere"),
        (["replay", "x.jsonl"], "--base"),
        (["replay", "/nowhere.jsonl", "--base", NOBODY], "/nowhere.jsonl"),
        (["up", "--slots", "0"], "--slots"),
        (["up", "--context", "-5"], "--context"),
        (["up", "--model", "/nowhere.gguf"], "--model: there is no file /nowhere.gguf"),
        (["up", "--model", __file__], "is not a GGUF file"),
        (["up", "--engine", "/nowhere/llama-server"], "/nowhere/llama-server"),
        (["up", "--slot-dir", f"{__file__}/slots"], "--slot-dir"),
        (["up", "--model", __file__, "--", "-m", "other.gguf"], "named twice"),
        (["up", "--model", __file__, "--", "-m"], "named twice"),
    ],
    ids=lambda value: " ".join(value).replace(__file__, "FILE") if isinstance(value, list) else "",
)
def test_a_wrong_word_is_a_usage_error_that_says_which(words, hint, told):
    code, _, err = told(*words)
    assert code == 2
    assert hint in err
    assert "Traceback" not in err


def test_a_port_that_is_taken_is_a_usage_error(told):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, _, err = told("serve", "--listen", address, "--admin-listen", "127.0.0.1:0")
    assert code == 2
    assert "cannot listen" in err


# -- exit code 1: something else is wrong --------------------------------------------------------------


def test_doctor_without_an_engine_is_a_failure_and_says_what_to_do(told):
    code, out, _ = told("doctor", "--upstream", NOBODY)
    assert code == 1
    assert f"{NOBODY} does not answer. Start llama-server there" in out


def test_snapshots_without_a_sidecar_are_a_failure_that_says_what_to_do(told):
    code, out, err = told("snapshots", "ls", "--admin", NOBODY)
    assert (code, out) == (1, "")
    assert f"no sidecar answers at {NOBODY}" in err
    assert "--slot-dir" in err


def test_snapshots_are_asked_for_where_the_sidecars_own_variables_say(told, monkeypatch):
    monkeypatch.setenv("SLOTKEEPER_ADMIN_LISTEN", "0.0.0.0:1")
    monkeypatch.setenv("SLOTKEEPER_ADMIN_TOKEN", "s3cret")
    assert "no sidecar answers at http://127.0.0.1:1." in told("snapshots", "ls")[2]


def test_doctor_tries_out_the_folder_that_it_is_given(told, monkeypatch):
    seen = []

    async def doctor(*words) -> int:
        seen.append(words)
        return 0

    monkeypatch.setattr("slotkeeper.cli.doctor.doctor", doctor)
    told("doctor", "--upstream", NOBODY, "--slot-dir", "/s")
    told("doctor", "--upstream", NOBODY)
    assert [(upstream, folder) for upstream, _, _, folder in seen] == [(NOBODY, Path("/s")), (NOBODY, None)]


# -- words after -- ------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch) -> list[dict]:
    """What `up` was called with, instead of a start."""
    calls: list[dict] = []

    def up(settings, **given) -> int:
        calls.append({"settings": settings, **given})
        return 0

    monkeypatch.setattr("slotkeeper.cli.up.up", up)
    return calls


def test_words_after_the_dashes_go_to_the_engine_untouched(told, started):
    words = ["--listen", "0.0.0.0:1", "-ngl", "99", "--", "--version"]
    code, _, _ = told("up", "--model", "m.gguf", "--listen", "127.0.0.1:0", "--", *words)
    assert code == 0
    assert started[0]["extra"] == words
    assert started[0]["model"] == Path("m.gguf")
    assert started[0]["settings"].listen == "127.0.0.1:0"


def test_up_says_nothing_of_slots_and_context_unless_asked(told, started):
    told("up")
    told("up", "--slots", "3", "--context", "4096")
    assert [(call["slots"], call["context_tokens"]) for call in started] == [(None, None), (3, 4096)]


def test_the_exit_code_of_up_is_that_of_the_program(told, monkeypatch):
    monkeypatch.setattr("slotkeeper.cli.up.up", lambda *_, **__: 1)
    assert told("up")[0] == 1


def test_an_interrupt_ends_without_a_traceback(told, monkeypatch):
    def interrupted(*_, **__) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("slotkeeper.cli.up.up", interrupted)
    code, _, err = told("up")
    assert code == 130
    assert not err


def test_keys_prints_what_the_list_needs_and_the_key_beside_it(capsys, tmp_path):
    assert main(["keys", "alice"]) == 0
    out, err = capsys.readouterr()
    path = tmp_path / "keys.toml"
    path.write_text(out)
    key = err.split()[-1]
    found = KeyList.read(path).find(key)
    assert found is not None
    assert found.name == "alice"
    assert main(["keys", "two words"]) == 2


def test_a_keys_file_that_others_may_read_is_refused_at_the_start(capsys, tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text('[alice]\nkey = "a-long-key-of-alice"\n')
    path.chmod(0o644)
    assert main(["serve", "--keys-file", str(path)]) == 2
    said = capsys.readouterr().err
    assert "Fix it: chmod 600" in " ".join(said.split())
    assert "a-long-key" not in said
