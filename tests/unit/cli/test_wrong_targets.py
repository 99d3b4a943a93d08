"""Every command with a wrong target: its exit code, and a sentence that says what to do next.

Exit codes: 2 for wrong arguments or settings, 1 for faults elsewhere.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import pytest

from commands.process import NOBODY, ended, serving
from slotkeeper.cli import doctor, starting
from slotkeeper.engine.child.launch import free_port
from slotkeeper.engine.managers import LEMONADE
from slotkeeper.engine.nearby import look
from slotkeeper.settings import Settings

USAGE, FAILURE = 2, 1
TOKEN: Final = "s3cret"  # noqa: S105
PAGE: Final = b"<!DOCTYPE html><html><body>Welcome to somewhere else</body></html>"
EVERYWHERE: Final = "0.0.0.0"  # noqa: S104
CAP_DAC_OVERRIDE, PR_CAPBSET_DROP = 1, 24


Check = Callable[..., None]


def examine(code: int, hints: tuple[str, ...], ended: tuple[int, str]) -> None:
    found, said = ended
    assert found == code, said
    for hint in hints:
        assert hint in said
    assert "Traceback" not in said
    assert "<" not in said.replace("<redacted>", ""), "a page for browsers was quoted"


@pytest.fixture
def check(run_cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Run a command here, with these variables; check its exit code and what it says."""
    for name in Settings.model_fields:
        monkeypatch.delenv(f"SLOTKEEPER_{name.upper()}", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "1000")

    def run(code: int, hints: tuple[str, ...], *words: str, env: Mapping[str, str] | None = None) -> None:
        with monkeypatch.context() as variables:
            for name, value in (env or {}).items():
                variables.setenv(name, value)
            found, *said = run_cli(*words)
        examine(code, hints, (found, "".join(said)))

    return run


def check_process(code: int, hints: tuple[str, ...], *words: str, **how: Any) -> str:
    """Run a command in its own process. Returns what it says."""
    done = ended(*words, **how)
    examine(code, hints, (done.returncode, done.stdout + done.stderr))
    return done.stdout + done.stderr


# -- words ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["srve"], "slotkeeper: there is no command 'srve'; did you mean serve?"),
        (["helth", "--live"], "did you mean health?"),
        (["serve", "--listn", "x"], "slotkeeper serve: there is no --listn; did you mean --listen?"),
        (["serve", "--slotdir=/x"], "there is no --slotdir; did you mean --slot-dir?"),
        (["serve", "--no-probe"], "there is no --no-probe; it was removed: its value is fixed now"),
        (["serve", "--head-timeout", "60"], "there is no --head-timeout; it was removed"),
        (["serve", "--gibberish"], "slotkeeper serve --help-all lists all flags"),
        (["up", "--modle", "x"], "slotkeeper up: there is no --modle; did you mean --model?"),
        (["up", "-ngl", "99"], "flags of llama-server go after --"),
        (["up", "--context", "many"], "--context"),
        (["demo", "--engne", "x"], "did you mean --engine?"),
        (
            ["doctor", "--upstrem", NOBODY],
            "slotkeeper doctor: there is no --upstrem; did you mean --upstream?",
        ),
        (["why", "--admin-tokn", "x"], "did you mean --admin-token?"),
        (["top", "--evry", "2"], "did you mean --every?"),
        (["health", "--liv"], "no sidecar answers"),  # the beginning of a flag is enough
        (["snapshots", "ls", "--jsn"], "did you mean --json?"),
        (["replay", "x.jsonl", "--bas", NOBODY, "--agianst", NOBODY], "did you mean --against?"),
        (["lint", "x.jsonl", "--jsno"], "did you mean --json?"),
        (
            ["serve", "--hot-bytes", "plenty"],
            "--hot-bytes: 'plenty' is not a size; write it as a number of bytes, or as in 32GiB",
        ),
        (["serve", "--hot-bytes", "5 gigs"], "as in 32GiB"),
        (["serve", "--drain-delay", "soon"], "--drain-delay: 'soon' is not a number; write it as in 2.5"),
        (
            ["serve", "--upstream", "localhost:8081"],
            "--upstream: 'localhost:8081' is not a URL; write http://HOST:PORT",
        ),
        (["doctor", "--upstream", "localhost:8081"], "--upstream: 'localhost:8081' is not a URL"),
        (["replay", "x.jsonl", "--base", "localhost"], "--base: 'localhost' is not a URL"),
        *(
            ([*command, "--admin", "localhost:9090"], "--admin: 'localhost:9090' is not a URL")
            for command in (["why"], ["top"], ["health"], ["snapshots", "ls"])
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_misspelled_word_gets_a_suggestion(check, words, hint):
    check(
        FAILURE if hint == "no sidecar answers" else USAGE,
        (hint,),
        *words,
        env={"SLOTKEEPER_ADMIN_LISTEN": "127.0.0.1:1"},
    )


def test_a_misspelled_setting_in_a_file_or_variable_gets_a_suggestion(check, tmp_path: Path):
    config = tmp_path / "slotkeeper.toml"
    config.write_text('hot_byts = "32GiB"\n', "utf-8")
    check(
        USAGE,
        (f"{config}: hot_byts: there is no such setting; did you mean hot_bytes?",),
        "serve",
        "--config",
        str(config),
    )
    check(
        USAGE,
        ("SLOTKEEPER_UPSTREM: there is no such variable; did you mean SLOTKEEPER_UPSTREAM?",),
        "serve",
        env={"SLOTKEEPER_UPSTREM": NOBODY},
    )


# -- our own address -----------------------------------------------------------------------------------


def address_of_this_machine() -> str:
    """Return an address by which other machines reach this one, if there is one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plug:
        try:
            plug.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            return "127.0.0.1"
        return str(plug.getsockname()[0])


@pytest.mark.parametrize(
    ("listen", "upstream"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "localhost"),
        ("127.0.0.1", EVERYWHERE),
        ("127.0.0.1", "[::1]"),
        ("127.0.0.1", "[::]"),
        ("127.0.0.1", "[::ffff:127.0.0.1]"),
        ("localhost", "127.0.0.1"),
        (EVERYWHERE, "127.0.0.1"),
        (EVERYWHERE, "localhost"),
        (EVERYWHERE, address_of_this_machine()),
        ("[::1]", "localhost"),
    ],
)
def test_an_upstream_that_is_the_sidecars_own_data_port_is_refused(check, listen, upstream):
    port = free_port()
    url = f"http://{upstream}:{port}"
    hints = (
        f"--upstream: at {url} Slotkeeper itself listens (--listen {listen}:{port})",
        "http://127.0.0.1:8081",
    )
    check(USAGE, hints, "serve", "--listen", f"{listen}:{port}", "--upstream", f"{url}/v1")


def test_an_upstream_that_is_the_sidecars_own_admin_port_is_refused(check):
    address = f"127.0.0.1:{free_port()}"
    check(USAGE, ("--admin-listen",), "serve", "--admin-listen", address, "--upstream", f"http://{address}")


def test_a_port_in_use_is_named(check):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        hints = ("cannot listen", "choose another --listen", str(taken.getsockname()[1]))
        check(
            USAGE, hints, "serve", "--upstream", NOBODY, "--listen", address, "--admin-listen", "127.0.0.1:0"
        )
        check(
            USAGE, hints, "serve", "--upstream", NOBODY, "--admin-listen", address, "--listen", "127.0.0.1:0"
        )


# -- targets that are no llama-server ----------------------------------------------------------------------


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, Path]:
    """Run programs that a user could take for a llama-server."""
    text, listed, script = tmp_path / "text", tmp_path / "listed", tmp_path / "script"
    text.write_text("llama-server\n", "utf-8")
    listed.write_text("llama-server\n", "utf-8")
    listed.chmod(0o755)
    script.write_text("#!/bin/sh\necho 'cannot find libcuda.so' >&2\nexit 3\n", "utf-8")
    script.chmod(0o755)
    true = shutil.which("true")
    assert true
    return {
        "true": Path(true),
        "no exec bit": text,
        "text": listed,
        "folder": tmp_path,
        "absent": tmp_path / "absent",
        "broken": script,
    }


@pytest.mark.parametrize("command", ["up", "demo"])
@pytest.mark.parametrize(
    ("name", "hints"),
    [
        ("true", ("is not a llama-server", "--engine PATH")),
        ("no exec bit", ("may not be executed", "chmod +x ")),
        ("text", ("is not a program for this machine", "--engine PATH")),
        ("folder", ("is a folder", "--engine PATH")),
        ("absent", ("does not exist", "pip install 'slotkeeper[engine]'")),
        ("broken", ("failed (3)", "cannot find libcuda.so")),
    ],
)
def test_an_engine_program_that_is_not_a_llama_server_is_a_usage_error(check, command, name, hints, programs):
    path = str(programs[name])
    check(USAGE, (path, *hints), command, "--engine", path)


# -- folders -------------------------------------------------------------------------------------------


def without_override() -> None:
    """Root may write anywhere unless it drops this capability. For others it changes nothing."""
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0)


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[dict[str, Path]]:
    file, closed = tmp_path / "file", tmp_path / "closed place"
    file.write_text("x", "utf-8")
    closed.mkdir(mode=0o500)
    yield {
        "file": file,
        "in a file": file / "slots",
        "no parent": tmp_path / "typo" / "deep" / "slots",
        "closed": closed,
        "in a closed one": closed / "slots",
        "in /proc": Path("/proc/slots"),  # where no process can make a folder
    }
    closed.chmod(0o700)


@pytest.mark.parametrize(
    ("name", "hints"),
    [
        ("file", ("file is not a folder", "Give another one")),
        ("in a file", ("file is not a folder", "Give another one")),
        ("no parent", ("typo. Make it: mkdir -p -m 700 ",)),
        ("in /proc", ("/proc/slots cannot be made there", "Give another one")),
    ],
)
def test_an_unusable_folder_is_a_usage_error_at_the_start(check, name, hints, folders):
    check(USAGE, ("--slot-dir: ", *hints), "serve", "--upstream", NOBODY, "--slot-dir", str(folders[name]))


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["serve", "--upstream", NOBODY, "--slot-dir"], "closed"),
        (["serve", "--upstream", NOBODY, "--slot-dir"], "in a closed one"),
        (["up", "--record"], "closed"),
    ],
)
def test_a_folder_without_write_access_is_a_usage_error_at_the_start(words, name, folders):
    hints = (f"{words[-1]}: ", "cannot write to", "sudo install -d -m 700 -o ")
    check_process(USAGE, hints, *words, str(folders[name]), preexec_fn=without_override)


@pytest.mark.parametrize("flag", ["--slot-dir", "--cold-dir", "--record"])
def test_every_folder_setting_is_checked_at_the_start(check, flag, folders):
    words = ("serve", "--upstream", NOBODY, flag, str(folders["no parent"]))
    check(USAGE, (f"{flag}: ", "Make it: mkdir -p"), *words)


def test_the_suggested_command_repairs_the_folder(folders):
    """As far as the user's rights allow."""
    folder = folders["no parent"]
    words = ("serve", "--upstream", NOBODY, "--slot-dir", str(folder))
    said = check_process(USAGE, ("mkdir -p",), *words)
    assert os.system(said.rpartition("Make it: ")[2]) == 0  # noqa: S605 - of our own message
    with serving("--upstream", NOBODY, "--slot-dir", str(folder)) as (process, _, _):
        assert process.poll() is None


# -- servers of another kind ---------------------------------------------------------------------------


class Elsewhere(BaseHTTPRequestHandler):
    """A web server that is no llama-server."""

    status = 404

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def served(handler: type[Elsewhere]) -> Iterator[str]:
    """Run a server with this handler, and yield its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(params=[404, 200])
def elsewhere(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a server without such a page, and one that has a page for every path."""
    with served(type("Handler", (Elsewhere,), {"status": request.param})) as url:
        yield url


@pytest.mark.parametrize("command", ["serve", "doctor"])
def test_an_upstream_that_is_not_a_llama_server_is_a_failure(check, command, elsewhere):
    ports = ("--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0") if command == "serve" else ()
    hints = (f"{elsewhere} is not a llama-server", "by --upstream")
    check(FAILURE, hints, command, "--upstream", f"{elsewhere}/v1/", *ports)


class Ollama(Elsewhere):
    """What Ollama answers (ollama/ollama, server/routes.go); it is not the program."""

    def do_GET(self) -> None:
        found = self.path == "/"
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(b"Ollama is running" if found else b"404 page not found")


@pytest.fixture
def ollama() -> Iterator[str]:
    with served(Ollama) as url:
        yield url


ANY_PORTS: Final = ("--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0")
ASKING: Final = (("serve", *ANY_PORTS), ("doctor",))


@pytest.mark.parametrize("command", ASKING, ids=lambda words: words[0])
def test_of_a_program_that_starts_llama_server_it_is_said_what_can_be_had_there(check, command, ollama):
    hints = (f"{ollama} is Ollama: ", "slotkeeper up --model", "slotkeeper docs managers")
    check(FAILURE, hints, *command, "--upstream", ollama)


@pytest.mark.parametrize("command", ASKING, ids=lambda words: words[0])
def test_auto_ends_with_what_to_do_if_no_engine_can_be_used(check, command, ollama, monkeypatch, tmp_path):
    here = partial(look, ports=(int(ollama.rpartition(":")[2]),), proc=tmp_path)
    monkeypatch.setattr(starting, "look", here)
    monkeypatch.setattr(doctor, "look", here)
    hints = ("--upstream auto: no engine that can be used", f"{ollama} is Ollama", "slotkeeper docs managers")
    check(FAILURE, hints, *command, "--upstream", "auto")


def test_doctor_says_what_has_started_an_engine_and_which_setting_keeps_it_useful(check, monkeypatch):
    monkeypatch.setattr(doctor, "starter_of", lambda _: LEMONADE)
    hints = (f"Lemonade has started this engine. To keep it useful, {LEMONADE.do}.", "does not answer")
    check(FAILURE, hints, "doctor", "--upstream", NOBODY)


def test_auto_stands_alone(check, tmp_path):
    table = tmp_path / "engines.toml"
    table.write_text(f'[one]\nurl = "{NOBODY}"\n')
    both = ("serve", "--upstream", "auto", "--upstream", NOBODY)
    for words in (both, ("serve", "--upstream", "auto", "--upstreams-file", str(table))):
        check(USAGE, ("auto finds one engine of this machine: name no other",), *words)


@pytest.mark.parametrize("command", [["why"], ["why", "last"], ["top"], ["health"], ["snapshots", "ls"]])
def test_an_admin_address_that_is_not_a_sidecar_is_a_failure(check, command, elsewhere):
    check(FAILURE, ("is not on the admin port of a sidecar", "--admin"), *command, "--admin", elsewhere)


@pytest.mark.parametrize("command", [["why"], ["why", "last"], ["top"], ["health"], ["snapshots", "ls"]])
def test_commands_report_a_sidecar_that_is_down(check, command):
    check(FAILURE, (f"no sidecar answers at {NOBODY}", "--admin"), *command, "--admin", NOBODY)


# -- a sidecar whose engine is down --------------------------------------------------------------------


@pytest.fixture(scope="module")
def ports() -> Iterator[tuple[str, str]]:
    """Run a sidecar with a token and without an engine; yield the URLs of its data port and admin port."""
    with serving("--upstream", NOBODY, "--admin-token", TOKEN) as (_, data, admin):
        yield f"http://{data}", f"http://{admin}"


@pytest.mark.parametrize("command", [["why"], ["why", "last"], ["top"], ["snapshots", "ls"]])
def test_the_data_port_in_place_of_the_admin_port_is_a_failure(check, command, ports):
    check(FAILURE, ("is not on the admin port of a sidecar", "--admin"), *command, "--admin", ports[0])


@pytest.mark.parametrize("command", [["why"], ["why", "last"], ["top"], ["snapshots", "ls"]])
def test_a_wrong_or_missing_token_is_a_failure(check, command, ports):
    words = (*command, "--admin", ports[1])
    check(FAILURE, ("a bearer token is needed here", "--admin-token"), *words)
    check(
        FAILURE, ("this bearer token is not the right one", "--admin-token"), *words, "--admin-token", "guess"
    )
    check(FAILURE, ("not the right one",), *words, env={"SLOTKEEPER_ADMIN_TOKEN": "guess"})


def test_top_shows_an_engine_that_is_down(check, ports):
    check(
        0,
        (NOBODY.removeprefix("http://"), "down"),
        "top",
        "--once",
        "--admin",
        ports[1],
        "--admin-token",
        TOKEN,
    )
