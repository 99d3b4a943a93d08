"""The command line: exit codes, help texts, and output on the right stream."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slotkeeper import __version__
from slotkeeper.cli.main import main
from slotkeeper.exchange.keys import KeyList
from slotkeeper.settings import BASICS, GROUPS, Settings

COMMANDS = (
    "serve",
    "up",
    "demo",
    "bench",
    "doctor",
    "why",
    "top",
    "health",
    "snapshots",
    "keys",
    "replay",
    "lint",
    "docs",
    "completion",
)
NO_SERVER = "http://127.0.0.1:1"  # no server listens at this port
SERVING = {"aiohttp", "tiktoken", "uvloop", "structlog"}  # slow imports of `serve`
SETTINGS = {"pydantic", "pydantic_settings"}  # slow imports of the settings
ASKING = {"httpx", "asyncio"}  # of the commands that ask a sidecar
EXTRAS = {
    "redis",
    "obstore",
    "cryptography",
    "opentelemetry",
    "numpy",
    "gguf",
    "xllamacpp",
}  # of `slotkeeper[...]`
SHOWING = {"rich"}  # of tables; where click is installed too, httpx loads it for a program of its own
LOADED = (
    "import sys; sys.modules['click'] = None; from slotkeeper.cli.main import main\n"
    "try: main()\nfinally: print(*sys.modules.keys())"
)


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch, tmp_path):
    for name in Settings.model_fields:
        monkeypatch.delenv(f"SLOTKEEPER_{name.upper()}", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.parametrize(
    ("words", "unused"),
    [
        ("--version", SERVING | SETTINGS | ASKING | SHOWING),
        ("--help", SERVING | SETTINGS | ASKING | SHOWING),
        ("completion bash", SERVING | SETTINGS | ASKING | SHOWING),  # each new shell runs it
        (f"drain e --admin {NO_SERVER}", SERVING | SETTINGS | SHOWING),
        (f"undrain e --admin {NO_SERVER}", SERVING | SETTINGS | SHOWING),
        ("health", SERVING | SETTINGS | SHOWING),
        (f"why --admin {NO_SERVER}", SERVING | SETTINGS),
        (f"top --admin {NO_SERVER}", SERVING | SETTINGS),
        ("serve --help", SERVING | {"httpx"} | SHOWING),
    ],
)
def test_a_command_loads_no_modules_for_what_it_does_not_do(words, unused, monkeypatch):
    """Hooks and health checks start commands often, and most of a command's time is loading."""
    monkeypatch.setenv("SLOTKEEPER_ADMIN_LISTEN", "127.0.0.1:1")
    monkeypatch.setenv("SLOTKEEPER_ADMIN_HOST", "gateway")  # it resembles a setting that they read
    ran = subprocess.run(
        [sys.executable, "-c", LOADED, *words.split()], capture_output=True, text=True, check=False
    )
    loaded = set(ran.stdout.splitlines()[-1].split())
    assert "slotkeeper.cli.main" in loaded, ran.stderr
    assert unused & loaded == set()


def test_the_sidecar_starts_without_any_extra():
    line = "import sys; import slotkeeper.app; print(*sys.modules.keys())"
    ran = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True)
    assert EXTRAS & set(ran.stdout.split()) == set()


# -- help ----------------------------------------------------------------------------------------------


def test_version_prints_the_version_of_the_package(run_cli):
    assert run_cli("--version") == (0, f"slotkeeper {__version__} ", "")


def test_help_names_every_command(run_cli):
    code, out, _ = run_cli("--help")
    assert code == 0
    assert [name for name in COMMANDS if f" {name} " not in out] == []


def test_a_call_without_a_command_shows_the_help_and_exits_with_2(run_cli):
    code, out, _ = run_cli()
    assert code == 2
    assert "COMMAND" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_explains_every_option_and_gives_an_example(command, run_cli):
    """A sentence, an explanation of every option, and an example at the end."""
    code, out, _ = run_cli(command, "--help")
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


@pytest.mark.parametrize("command", ["serve", "up"])
def test_the_first_page_of_help_has_the_basic_settings_and_fits_a_screen(
    command, run_cli, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main([command, "--hot-bytes", "1GiB", "--help"])
    out = capsys.readouterr().out
    assert out.count("\n") <= 40
    shown = {name for name in Settings.model_fields if f"--{name.replace('_', '-')} " in out}
    assert shown == {*GROUPS[BASICS]} - ({"upstream"} if command == "up" else set())


def test_help_all_of_serve_names_every_setting_in_its_group(run_cli):
    _, out, _ = run_cli("serve", "--help-all")
    assert [title for title in GROUPS if f" {title}: --" not in out] == []
    missing = [name for name in Settings.model_fields if f"--{name.replace('_', '-')} " not in out]
    assert missing == []


def test_help_of_serve_names_units_and_every_choice(run_cli):
    """All settings that are no whole numbers are seconds, but one."""
    _, out, _ = run_cli("serve", "--help-all")
    shown = dict(re.findall(r"\[--([a-z-]+) (\S+)\]", out))
    fields = Settings.model_fields
    seconds = [name.replace("_", "-") for name, field in fields.items() if field.annotation is float]
    others = {name: shown[name] for name in seconds if shown[name] != "SECONDS"}
    assert others == {"max-delay-factor": "FACTOR"}
    choices = {"namespaces": "auto|key|off"}
    assert {name: shown[name] for name in choices} == choices


def test_up_has_no_upstream_option_because_it_starts_its_own_engine(run_cli):
    assert "--upstream" not in run_cli("up", "--help")[1]
    assert run_cli("up", "--upstream", NO_SERVER)[0] == 2
    assert "upstream" not in run_cli("up", "--print-config")[1]


# -- settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["serve", "up"])
def test_print_config_shows_value_and_origin_and_starts_nothing(command, run_cli, monkeypatch, tmp_path):
    config = tmp_path / "c.toml"
    config.write_text("drain_delay = 7.5\n", "utf-8")
    monkeypatch.setenv("SLOTKEEPER_LOG_LEVEL", "debug")
    words = ("--print-config", "--config", str(config), "--listen", "127.0.0.1:1234")
    code, out, _ = run_cli(command, *words)
    assert code == 0
    for line in (
        "listen 127.0.0.1:1234 flag",
        "log_level debug environment",
        f"drain_delay 7.5 file {config}",
        "namespaces auto default",
    ):
        assert line in out


def test_print_config_shows_no_secret_and_every_bracket(run_cli):
    _, out, _ = run_cli("serve", "--print-config", "--admin-token", "s3cret", "--record", "/[red]x")
    assert "s3cret" not in out
    assert "admin_token **********" in out
    assert "/[red]x" in out


def test_sizes_are_printed_with_binary_units(run_cli):
    assert "(default: 64MiB)" in run_cli("serve", "--help-all")[1]
    code, out, _ = run_cli("serve", "--print-config", "--hot-bytes", "1.5GiB")
    assert code == 0
    assert "hot_bytes 1536MiB flag" in out
    assert "max_body_bytes 64MiB default" in out


def test_a_switch_is_turned_on_by_a_flag_and_turned_off_by_another(run_cli, monkeypatch):
    assert "evacuate false default" in run_cli("serve", "--print-config")[1]
    assert "evacuate true flag" in run_cli("serve", "--print-config", "--evacuate")[1]
    monkeypatch.setenv("SLOTKEEPER_EVACUATE", "true")
    assert "evacuate true environment" in run_cli("serve", "--print-config")[1]
    assert "evacuate false flag" in run_cli("serve", "--print-config", "--no-evacuate")[1]


def test_several_upstream_flags_give_several_engines(run_cli):
    _, out, _ = run_cli("serve", "--print-config", "--upstream", "http://a:1", "--upstream", "http://b:1")
    assert "upstream http://a:1, http://b:1 flag" in out


# -- exit code 2: usage errors -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["nonsense"], "the commands are serve, up,"),
        (["serve", "--listen", "x"], "--listen: 'x' is not HOST:PORT"),
        (["serve", "--config", "/nowhere.toml"], "--config: there is no file /nowhere.toml"),
        (["serve", "--admin-listen", ":0"], "--admin-token"),
        (["serve", "--", "-ngl", "99"], "slotkeeper up"),
        (["why", "--last", "1e3"], "--last: '1e3' is not a whole number; write it as in 500"),
        (["why", "--last", "501"], "--last: 501 is not between 1 and 500"),
        (["top", "--every", "often"], "--every: 'often' is not a number; write it as in 2.5"),
        (["top", "--every", "nan"], "--every: nan is not between 0.1 and 3600 seconds"),
        (["up", "--slots", "two"], "--slots: 'two' is not a whole number; write it as in 500"),
        (["up", "--slots", "257"], "--slots: 257 is not between 1 and 256"),
        (["up", "--context", "1" * 20], "is not between 1 and 2147483647 tokens"),
        (
            ["serve", "--max-connections", "0"],
            "--max-connections: Input should be greater than or equal to 1",
        ),
        *(
            ([*command, wrong], f"{command[-1]}: {wrong} is not between 1 and 2147483647 tokens")
            for command in (["replay", "x", "--base", NO_SERVER, "--max-tokens"], ["lint", "x", "--context"])
            for wrong in ("-1", "0", "2147483648")
        ),
        (["doctor"], "--upstream"),
        (["snapshots"], "ls,verify,rm"),
        (["snapshots", "rm"], "--all"),
        (["snapshots", "rm", "abcd", "--all"], "--all"),
        (["snapshots", "ls", "--admin", NO_SERVER, "--slot-dir", "/s"], "not allowed with"),
        (["snapshots", "ls", "--cold-dir", "/s"], "--slot-dir"),
        (["snapshots", "ls", "--slot-dir", "/nowhere"], "no sidecar has ever kept snapshots in /nowhere"),
        (["replay", "x.jsonl"], "--base"),
        (["replay", "/nowhere.jsonl", "--base", NO_SERVER], "/nowhere.jsonl"),
        (["bench"], "--model --upstream --compare"),
        (["bench", "--model", "m", "--upstream", NO_SERVER], "not allowed with"),
        (["bench", "--model", "/nowhere.gguf"], "--model: there is no file /nowhere.gguf"),
        (["bench", "--model", "m", "--slot-dir", "/s"], "--slot-dir is for --upstream"),
        (["bench", "--upstream", NO_SERVER, "--", "-t", "1"], "are for --model"),
        (["bench", "--upstream", NO_SERVER, "--report", "/nowhere/mine"], "there is no folder /nowhere"),
        (["bench", "--upstream", NO_SERVER, "--rival", "mine"], "give NAME=COMMAND"),
        (["bench", "--upstream", NO_SERVER, "--rival", "hearth-llm"], "it needs --slot-dir"),
        (["bench", "--upstream", NO_SERVER, "--rival", "mine=./p {port}"], "lacks {upstream}"),
        (["bench", "--upstream", NO_SERVER, "--rival", "mine=./p {upstream} {ports}"], "unknown {ports}"),
        (["bench", "--upstream", NO_SERVER, "--rival", "mine=./p {upstream} {"], "--rival mine"),
        (["bench", "--upstream", NO_SERVER, "--rival", "mine='./p"], "--rival mine"),
        (["bench", "--upstream", NO_SERVER, "--rival", "stock=./p {upstream} {port}"], "name of its own"),
        (["bench", "--compare", "/nowhere.json", "/nowhere.json"], "/nowhere.json"),
        (["bench", "--upstream", NO_SERVER, "--minutes", "-1"], "--minutes"),
        (["up", "--slots", "0"], "--slots"),
        (["up", "--model", "/nowhere.gguf"], "--model: there is no file /nowhere.gguf"),
        (["up", "--model", __file__], "is not a GGUF file"),
        (["up", "--slot-dir", f"{__file__}/slots"], "--slot-dir"),
        (["up", "--model", __file__, "--", "-m", "other.gguf"], "named twice"),
        (["up", "--model", __file__, "--", "-m"], "named twice"),
    ],
    ids=lambda value: " ".join(value).replace(__file__, "FILE") if isinstance(value, list) else "",
)
def test_a_wrong_argument_is_a_usage_error_that_names_it(words, hint, run_cli):
    code, _, err = run_cli(*words)
    assert code == 2
    assert hint in err
    assert "Traceback" not in err


async def _full_disk(*_, **__) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_error_of_a_running_sidecar_is_not_called_a_failure_to_listen(run_cli, monkeypatch):
    monkeypatch.setattr("slotkeeper.app.serve", _full_disk)
    with pytest.raises(OSError, match="No space left"):
        run_cli("serve", "--upstream", NO_SERVER)


# -- exit code 1: other failures -----------------------------------------------------------------------


def test_doctor_without_an_engine_fails_and_says_what_to_do(run_cli):
    code, out, _ = run_cli("doctor", "--upstream", NO_SERVER)
    assert code == 1
    assert f"{NO_SERVER} does not answer. Start llama-server there" in out


def test_snapshots_without_a_sidecar_fails_and_says_what_to_do(run_cli):
    code, out, err = run_cli("snapshots", "ls", "--admin", NO_SERVER)
    assert (code, out) == (1, "")
    assert f"no sidecar answers at {NO_SERVER}" in err
    assert "--slot-dir" in err


def test_a_command_reads_its_variables_as_serve_does(run_cli, monkeypatch):
    """In any case, and a variable that resembles theirs may be that of another setting."""
    monkeypatch.setenv("slotkeeper_admin_listen", "127.0.0.1:1")
    monkeypatch.setenv("SLOTKEEPER_TLS_CRET_KEY", "a misspelt TLS_KEY, which the command does not read")
    assert f"no sidecar answers at {NO_SERVER}." in run_cli("drain", "x")[2]
    monkeypatch.setenv("SLOTKEEPER_ADMIN_LISTN", "127.0.0.1:1")
    code, _, err = run_cli("drain", "x")
    assert code == 2
    assert "SLOTKEEPER_ADMIN_LISTN: there is no such variable; did you mean SLOTKEEPER_ADMIN_LISTEN?" in err


def test_a_command_without_its_admin_token_asks_the_sidecar_all_the_same(run_cli, monkeypatch):
    monkeypatch.setenv("SLOTKEEPER_ADMIN_LISTEN", "0.0.0.0:1")
    assert run_cli("why")[::2] == run_cli("why", "--admin", NO_SERVER)[::2]
    assert run_cli("why")[0] == 1


@pytest.mark.parametrize("command", ["why", "top", "snapshots ls", "drain x"])
def test_a_command_that_needs_a_token_names_its_unreadable_file(command, run_cli, monkeypatch):
    monkeypatch.setenv("SLOTKEEPER_ADMIN_TOKEN_FILE", "/nowhere/token")
    code, _, err = run_cli(*command.split(), "--admin", NO_SERVER)
    assert code == 2
    assert "SLOTKEEPER_ADMIN_TOKEN_FILE: /nowhere/token" in err
    assert run_cli(*command.split(), "--admin", NO_SERVER, "--admin-token", "t")[0] == 1


@pytest.mark.parametrize(
    "words", [f"--compare {NO_SERVER} {NO_SERVER} --measure", f"--upstream {NO_SERVER} --json"]
)
def test_doctor_measures_one_engine_and_prints_only_that_as_json(words, run_cli):
    code, _, err = run_cli("doctor", *words.split())
    assert code == 2
    assert "--measure examines one --upstream" in err


def test_doctor_tries_the_given_slot_folder(run_cli, monkeypatch):
    seen = []

    async def doctor(*words) -> int:
        seen.append(words)
        return 0

    monkeypatch.setattr("slotkeeper.cli.doctor.doctor", doctor)
    run_cli("doctor", "--upstream", NO_SERVER, "--slot-dir", "/s")
    run_cli("doctor", "--upstream", NO_SERVER)
    assert [(upstream, folder) for upstream, _, _, folder, _ in seen] == [
        (NO_SERVER, Path("/s")),
        (NO_SERVER, None),
    ]


# -- arguments after -- --------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch) -> list[dict]:
    """Record the arguments of `up` instead of starting it."""
    calls: list[dict] = []

    def up(settings, **given) -> int:
        calls.append({"settings": settings, **given})
        return 0

    monkeypatch.setattr("slotkeeper.cli.up.up", up)
    return calls


def test_arguments_after_the_dashes_go_unchanged_to_the_engine(run_cli, started):
    words = ["--listen", "0.0.0.0:1", "-ngl", "99", "--", "--version"]
    code, _, _ = run_cli("up", "--model", "m.gguf", "--listen", "127.0.0.1:0", "--", *words)
    assert code == 0
    assert started[0]["extra"] == words
    assert started[0]["model"] == Path("m.gguf")
    assert started[0]["settings"].listen == "127.0.0.1:0"


def test_up_leaves_slots_and_context_to_the_engine_unless_they_are_given(run_cli, started):
    run_cli("up")
    run_cli("up", "--slots", "3", "--context", "4096")
    assert [(call["slots"], call["context_tokens"]) for call in started] == [(None, None), (3, 4096)]


def test_the_exit_code_of_up_is_that_of_its_run(run_cli, monkeypatch):
    monkeypatch.setattr("slotkeeper.cli.up.up", lambda *_, **__: 1)
    assert run_cli("up")[0] == 1


def test_an_interrupt_ends_the_program_without_a_traceback(run_cli, monkeypatch):
    def interrupted(*_, **__) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("slotkeeper.cli.up.up", interrupted)
    code, _, err = run_cli("up")
    assert code == 130
    assert not err


def test_keys_prints_the_entry_for_the_key_list_and_the_key_on_stderr(capsys, tmp_path):
    assert main(["keys", "alice"]) == 0
    out, err = capsys.readouterr()
    path = tmp_path / "keys.toml"
    path.write_text(out)
    key = err.split()[-1]
    found = KeyList.read(path).find(key)
    assert found is not None
    assert found.name == "alice"
    assert main(["keys", "two words"]) == 2


def test_a_keys_file_that_others_may_read_is_refused_at_start(capsys, tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text('[alice]\nkey = "a-long-key-of-alice"\n')
    path.chmod(0o644)
    assert main(["serve", "--keys-file", str(path)]) == 2
    said = capsys.readouterr().err
    assert "Fix it: chmod 600" in " ".join(said.split())
    assert "a-long-key" not in said
