"""`--upstream auto`: which engines of this machine are found, which one is chosen, and why not another."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from managed import OllamaLike, serving
from slotkeeper.engine.managers import LEMONADE, OLLAMA
from slotkeeper.engine.nearby import PORTS, Nearby, NotChosenError, Use, chosen, look, processes, starter_of

ENGINE = "llama-server -m /m/a.gguf --port 9001"
ELSEWHERE = "http://127.0.0.1:9001"
PAGE = Path(__file__).parents[3] / "docs" / "managers.md"


def process(
    proc: Path, pid: int, command: str | Sequence[str], *, parent: int = 1, environ: str | None = ""
) -> None:
    """Write what /proc shows of a process. `environ`: of its environment; None: it is another user's."""
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    words = command.split() if isinstance(command, str) else command
    (folder / "cmdline").write_bytes("".join(f"{word}\0" for word in words).encode())
    (folder / "stat").write_text(f"{pid} (a name) with) brackets) S {parent} 0 0\n")
    if environ is not None:
        (folder / "environ").write_bytes(f"{environ}\0".encode())


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    process(tmp_path, 1, "/sbin/init", parent=0)
    (tmp_path / "self").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("command", "base"),
    [
        (ENGINE, ELSEWHERE),
        ("/usr/lib/ollama/llama-server --port 41231 --host 127.0.0.1 --model b", "http://127.0.0.1:41231"),
        ("llama serve -m a.gguf", "http://127.0.0.1:8080"),
        ("/opt/llama serve -m a.gguf --port 9931 --host 0.0.0.0", "http://127.0.0.1:9931"),
        ("llama-server-cuda -m a.gguf --api-prefix /x --port 8001", "http://127.0.0.1:8001/x"),
        ("/py/python -m slotkeeper.engine.child.xllama -m a --port 8002", "http://127.0.0.1:8002"),
    ],
)
def test_an_engine_is_found_by_its_command_line(proc, command, base):
    process(proc, 7, command)
    assert list(processes(proc)) == [Nearby(base=base)]


@pytest.mark.parametrize(
    "command",
    [
        "vim llama-server.cpp",
        "sh -c llama-server",
        "llama cli -m a.gguf",
        "llama",
        "llama-server --port many",
        "",
    ],
)
def test_another_process_is_no_engine(proc, command):
    process(proc, 7, command)
    assert list(processes(proc)) == []


def test_the_environment_counts_where_it_can_be_read(proc):
    process(proc, 7, "llama-server -m a", environ="LLAMA_ARG_PORT=9001")
    assert [one.base for one in processes(proc)] == [ELSEWHERE]


@pytest.mark.parametrize(
    ("parent", "command", "use"),
    [
        ("/usr/bin/lemond", ENGINE, Use.YES),
        ("llama-server --models-dir /m", ENGINE, Use.FRONTED),
        ("llama serve", ENGINE, Use.FRONTED),
        ("/usr/bin/llama-swap --config a.yaml", ENGINE, Use.FRONTED),
        ("/py/python -m slotkeeper up --model a", ENGINE, Use.FRONTED),
        ("/py/python /py/bin/slotkeeper up --model a", ENGINE, Use.FRONTED),
        ("/bin/sh /srv/llama-server.sh", ENGINE, Use.YES),
        ("/bin/sh", f"{ENGINE} --embeddings", Use.NO_CHAT),
        ("/bin/sh", f"{ENGINE} --reranking", Use.NO_CHAT),
        ("/usr/bin/ollama serve", f"{ENGINE} --no-jinja --chat-template chatml", Use.PLACEHOLDER),
        ("/usr/bin/ollama serve", ENGINE, Use.YES),
        ("/bin/sh", f"{ENGINE} --no-jinja", Use.YES),
    ],
)
def test_what_started_an_engine_decides_whether_it_is_used(proc, parent, command, use):
    process(proc, 6, parent)
    process(proc, 7, command, parent=6)
    (found,) = (one for one in processes(proc) if one.base == ELSEWHERE)
    assert found.use is use


def test_the_manager_of_an_engine_is_known(proc):
    process(proc, 6, "/usr/bin/lemond")
    process(proc, 7, ENGINE, parent=6)
    assert starter_of(f"{ELSEWHERE}", proc) is LEMONADE
    assert starter_of("http://localhost:9001", proc) is LEMONADE
    assert starter_of("http://10.0.0.1:9001", proc) is None
    assert starter_of("http://127.0.0.1:9002", proc) is None


def test_an_engine_of_another_user_is_found_without_its_environment_and_parent(proc):
    process(proc, 7, ENGINE, parent=6, environ=None)
    assert list(processes(proc)) == [Nearby(base=ELSEWHERE)]


def test_where_there_is_no_proc_nothing_is_found(tmp_path):
    assert list(processes(tmp_path / "none")) == []


# -- what answers there --------------------------------------------------------------------------------


@asynccontextmanager
async def engine(marker: str = "<m>", **props: Any) -> AsyncIterator[int]:
    """Serve what a llama-server answers to /health and /props; yield its port."""

    async def answer(request: web.Request) -> web.Response:
        said = {"total_slots": 1, "media_marker": marker, **props} if request.path == "/props" else {}
        return web.json_response(said)

    app = web.Application()
    app.router.add_get("/{path:health|props}", answer)
    async with TestServer(app) as server:
        assert server.port
        yield server.port


async def test_the_only_engine_is_chosen_by_its_process(proc):
    async with engine() as port:
        process(proc, 7, f"llama-server -m a --port {port}")
        process(proc, 8, "llama-server -m b --port 1")  # it has ended, or is in a container
        found = await look(ports=(), proc=proc)
    assert chosen(found).base == f"http://127.0.0.1:{port}"


async def test_the_only_engine_is_chosen_by_its_port(tmp_path):
    async with engine() as port:
        found = await look(ports=(1, port), proc=tmp_path / "none")
    assert chosen(found).base == f"http://127.0.0.1:{port}"


async def test_a_router_is_an_engine(tmp_path):
    async with engine(role="router") as port:
        assert chosen(await look(ports=(port,), proc=tmp_path)).base.endswith(str(port))


async def test_no_key_is_sent_to_what_may_be_anything(tmp_path):
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.extend(request.headers)
        return web.json_response({"total_slots": 1})

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server:
        assert server.port
        await look(ports=(server.port,), proc=tmp_path)
    assert seen
    assert not {"Authorization", "X-Api-Key"} & set(seen)


async def test_our_own_ports_are_left_out(tmp_path):
    async with engine() as port:
        assert await look(ports=(port,), without=(port,), proc=tmp_path) == []


async def test_one_engine_at_two_addresses_is_one(proc):
    """A sidecar passes /props on, with the marker of the engine's process."""
    async with engine("<a>") as port, engine("<a>") as front:
        process(proc, 7, f"llama-server -m a --port {port}")
        found = await look(ports=(front,), proc=proc)
    assert chosen(found).base == f"http://127.0.0.1:{port}"
    assert [one.use for one in found] == [Use.YES, Use.SAME]


async def test_a_sidecar_and_the_engine_that_it_started_are_not_used(proc):
    async with engine("<a>") as port, engine("<a>") as front:
        process(proc, 6, "/py/python -m slotkeeper up")
        process(proc, 7, f"llama-server -m a --port {port}", parent=6)
        with pytest.raises(NotChosenError, match="another program is in front of it"):
            chosen(await look(ports=(front,), proc=proc))


@pytest.mark.parametrize("marker", ["", "?"])
async def test_engines_without_a_marker_are_not_taken_for_one(tmp_path, marker):
    async with engine(marker) as port, engine(marker) as other:
        with pytest.raises(NotChosenError, match="2 engines answer") as refused:
            chosen(await look(ports=(port, other), proc=tmp_path))
    assert f"--upstream http://127.0.0.1:{port}" in str(refused.value)
    assert f"--upstream http://127.0.0.1:{other}" in str(refused.value)


async def test_if_only_a_manager_answers_it_is_named_with_what_to_do(tmp_path):
    async with serving(OllamaLike((), {}, {}, tmp_path)) as base:
        found = await look(ports=(int(base.rpartition(":")[2]),), proc=tmp_path)
    with pytest.raises(NotChosenError, match="is Ollama") as refused:
        chosen(found)
    assert OLLAMA.do in str(refused.value)
    assert "slotkeeper docs managers" in str(refused.value)


async def test_if_nothing_answers_the_message_says_what_to_do(tmp_path):
    with pytest.raises(NotChosenError, match=r"no llama-server answers.*give its URL"):
        chosen(await look(ports=(1,), proc=tmp_path))


async def test_an_engine_that_a_manager_names_is_chosen_without_proc(tmp_path):
    async with engine() as port:
        said = {"all_models_loaded": [{"recipe": "llamacpp", "backend_url": f"http://127.0.0.1:{port}/v1"}]}

        async def answer(_: web.Request) -> web.Response:
            return web.json_response(said)

        app = web.Application()
        app.router.add_get(LEMONADE.asked, answer)
        async with TestServer(app) as server:
            assert server.port
            found = await look(ports=(server.port,), proc=tmp_path)
    assert chosen(found).base == f"http://127.0.0.1:{port}"


def test_the_page_names_the_ports_that_are_asked():
    *ports, last = map(str, PORTS)
    assert f"ports {', '.join(ports)} and {last} of this machine" in PAGE.read_text("utf-8")
