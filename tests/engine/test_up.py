"""`slotkeeper up`, as a user starts it: it starts a real engine, keeps it alive, and ends it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import httpx
import pytest

from engine.conftest import wait_until
from engine.under_up import CHAT, QUIET, Up, is_alive
from patience import PATIENCE
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.models import build as build_model
from slotkeeper.engine.child.launch import EngineKind

pytestmark = pytest.mark.one_in(8)

# Not brief: the tokens of a brief request may come too late for the request after it.
LONG = {"messages": [{"role": "user", "content": "Say something about rivers and mountains. " * 20}]}

STARTS = 5  # that fail, until one says why

SETTINGS = "from slotkeeper.settings import Settings"
MAIN = "import runpy; runpy.run_module('slotkeeper', run_name='__main__')"
Start = Callable[..., AbstractContextManager[Up]]


@pytest.fixture
def words(build) -> list[str]:
    own = ["up", "--engine", build, "--drain-delay", "0", *QUIET]
    return [*own, "--model", str(build_model(Tiny.HYBRID))]


@pytest.fixture
def environ(tmp_path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SLOTKEEPER_")}
    return {**kept, "XDG_STATE_HOME": str(tmp_path / "state")}


@pytest.fixture
def up(words, environ, tmp_path) -> Start:
    """Return a function that starts `up`; at the end of the block the rest is killed, the engine too."""

    @contextmanager
    def start(*own: str, engine: tuple[str, ...] = (), before: str = "") -> Iterator[Up]:
        """`before` is run first in the process of `up`."""
        # One thread: on a busy machine two wait for each other (b11549: a hundred times slower).
        python, script = [sys.executable, "-c"], f"{SETTINGS}\n{before}\n{MAIN}"
        running = Up([*python, script, *words, *own, "--", "-t", "1", *engine], tmp_path / "up.log", environ)
        engine_pid = None
        try:
            wait_until(running.ready)
            engine_pid = running.engine
            yield running
        finally:
            sys.stdout.write(running.log.read_text("utf-8"))  # shown with a failure
            left = [running.engine, engine_pid]
            running.process.kill()
            running.process.wait()
            for pid in filter(None, left):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    return start


def end_of(words: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command that ends by itself."""
    command = [sys.executable, "-m", "slotkeeper", *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE, check=False)


# -- normal starts -------------------------------------------------------------------------------------


def test_a_chat_is_answered_and_sigterm_ends_up_cleanly(up):
    with up() as running:
        engine = running.engine
        answer = running.chat()
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]
        assert answer.headers["X-Slotkeeper-Slot"] in {"0", "1"}
        first, again = running.chat(**LONG), running.chat(**LONG)
        assert first.json()["timings"]["cache_n"] < again.json()["timings"]["cache_n"], "no slot is reused"

        long = {**CHAT, "max_tokens": 400, "stream": True, "ignore_eos": True}
        url = f"{running.url()}/v1/chat/completions"
        with httpx.stream("POST", url, json=long, timeout=PATIENCE) as stream:
            chunks = stream.iter_raw()
            said = next(chunks)
            running.process.send_signal(signal.SIGTERM)
            said += b"".join(chunks)
        assert said.rstrip().endswith(b"data: [DONE]"), "a running answer is finished"
        assert running.process.wait(timeout=PATIENCE) == 0
        assert not is_alive(engine)
        with pytest.raises(httpx.ConnectError):
            running.chat()


def test_a_frozen_engine_is_replaced_and_its_clients_only_wait(up):
    # Long enough that a busy machine does not make the engine silent for as long by itself.
    with up(before="Settings.engine_frozen_after = 10.0") as running:
        first = running.engine
        assert running.chat().status_code == 200
        os.kill(first, signal.SIGSTOP)
        assert running.chat().status_code == 200
        assert running.engine not in {None, first}
        assert [line["replaced"] for line in running.lines("engine_frozen")] == [True]
        assert [line["returncode"] for line in running.lines("engine_died")] == [-signal.SIGKILL]
        assert len(running.lines("sent_again")) == 1


def test_llama_servers_web_ui_stays_at_its_usual_path(up):
    """Its scripts are beside the page, under names that differ between builds."""
    with up() as running:
        page = httpx.get(f"{running.url()}/", timeout=PATIENCE)
        assert page.headers["Content-Type"].startswith("text/html")
        assert "<!doctype html>" in page.text
        scripts = re.findall(r"""["'(]\.?/?([\w./-]+\.js)["')]""", page.text)
        assert scripts, "a page without a script is no chat"
        answers = [httpx.get(f"{running.url()}/{name}", timeout=PATIENCE) for name in scripts]
        assert {answer.status_code for answer in answers} == {200}
        assert all("javascript" in answer.headers["Content-Type"] for answer in answers)


def test_the_users_own_engine_flags_replace_those_of_up(up):
    with up("--slots", "2", engine=("-np", "3", "-c", "6144")) as running:
        slots = httpx.get(f"{running.url()}/slots", timeout=PATIENCE).json()
        assert [slot["n_ctx"] for slot in slots] == [2048] * 3
        state = httpx.get(f"{running.url('admin')}/api/state", timeout=PATIENCE).json()
        assert len(state["engines"][0]["slots"]) == 3


def test_an_api_key_among_the_engine_flags_is_used_by_the_sidecar_and_never_logged(up, build):
    more = ("-hft", "s3cret-key-too") if build == EngineKind.SKULK else ()  # the library has no such flag
    with up(engine=("--api-key", "s3cret-key", *more)) as running:
        assert httpx.get(f"{running.url()}/slots", timeout=PATIENCE).status_code == 401, (
            "clients need it as before"
        )
        asked = f"{running.url()}/v1/chat/completions"
        answer = httpx.post(
            asked, json=CHAT, headers={"Authorization": "Bearer s3cret-key"}, timeout=PATIENCE
        )
        assert answer.status_code == 200
        assert answer.headers["X-Slotkeeper-Decision"] != "unrendered", "our own calls were refused"
        assert "s3cret-key" not in running.log.read_text("utf-8")


# -- starts that fail ----------------------------------------------------------------------------------


def reported_end_of(words: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a start that fails in the engine, until the engine has logged why (engine/child/process.py)."""
    for _ in range(STARTS):
        ended = end_of(words, environ)
        if "its log is empty" not in ended.stderr:
            return ended
    pytest.fail(f"in {STARTS} starts the engine logged nothing: {ended.stderr}")


def test_an_engine_that_dies_at_its_start_is_reported_with_the_end_of_the_log_of_this_run(
    words, environ, tmp_path
):
    log = tmp_path / "state" / "slotkeeper" / "llama-server.log"
    log.parent.mkdir(parents=True)
    log.write_text("what went wrong yesterday\n", "utf-8")
    ended = reported_end_of([*words, "--", "--no-such-flag"], environ)
    assert ended.returncode == 1
    told = ended.stderr.rpartition("slotkeeper up: ")[2]
    assert "the engine ended with" in told
    assert "--no-such-flag" in told
    assert "Traceback" not in ended.stderr
    assert "yesterday" not in ended.stderr
    assert log.read_text("utf-8").startswith("what went wrong yesterday"), "the log itself is kept"


def test_an_engine_flag_without_its_value_is_a_usage_error(words, environ):
    ended = end_of([*words, "--", "--ctx-size"], environ)
    assert ended.returncode == 2
    assert "--ctx-size needs a value" in ended.stderr
