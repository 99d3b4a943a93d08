"""Programs that start llama-server are recognised by what they answer, and no other server is.

The answers come from stand-ins made from the programs' sources (`managed.py`).
"""

from __future__ import annotations

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from managed import LemonadeLike, LmStudioLike, Managed, OllamaLike, StudioLike, serving
from slotkeeper.engine.answers import Health
from slotkeeper.engine.client import EngineClient
from slotkeeper.engine.managers import LEMONADE, LM_STUDIO, MANAGERS, OLLAMA, UNSLOTH, manager_of, recognise

KINDS = {LEMONADE: LemonadeLike, OLLAMA: OllamaLike, LM_STUDIO: LmStudioLike, UNSLOTH: StudioLike}


def idle(kind: type[Managed], folder) -> Managed:
    """Return a manager that has loaded no model."""
    return kind((), {}, {}, folder)


@pytest.mark.parametrize("manager", MANAGERS, ids=lambda manager: manager.name)
async def test_a_manager_is_recognised_and_is_no_llama_server(manager, tmp_path):
    async with serving(idle(KINDS[manager], tmp_path)) as base, EngineClient(base) as client:
        assert await client.health() is Health.FOREIGN
        found = await recognise(base)
    assert found
    assert found.manager is manager
    assert found.engines == ()
    assert found.sentence(base).startswith(f"{base} is {manager.name}: ")


async def test_lemonade_names_its_llama_servers():
    loaded = {"recipe": "llamacpp", "backend_url": "http://127.0.0.1:8001/v1"}
    elsewhere = {"recipe": "llamacpp", "backend_url": "http://10.0.0.1:8001/v1"}
    others = [{**loaded, "recipe": "whispercpp"}, {"recipe": "llamacpp"}, elsewhere, 7]
    said = {"status": "ok", "all_models_loaded": [loaded, *others]}

    async def answer(_: web.Request) -> web.Response:
        return web.json_response(said)

    app = web.Application()
    app.router.add_get(LEMONADE.asked, answer)
    async with TestServer(app) as server:
        found = await recognise(str(server.make_url("")).rstrip("/"))
    assert found
    assert found.engines == ("http://127.0.0.1:8001",)


@pytest.mark.parametrize(
    "body",
    [
        b"<!DOCTYPE html><html>Ollama is running, and so is LM Studio</html>",
        orjson.dumps({"status": "ok"}),
        orjson.dumps({"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}}),
        b"\xff\xfe not text",
        b"",
    ],
)
@pytest.mark.parametrize("status", [200, 404])
async def test_another_server_is_not_taken_for_a_manager(body, status):
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, status=status)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        assert await recognise(str(server.make_url("")).rstrip("/")) is None


async def test_nobody_is_no_manager():
    assert await recognise("http://127.0.0.1:1") is None


@pytest.mark.parametrize(
    ("command", "manager"),
    [
        (["/usr/bin/lemond", "--port", "13305"], LEMONADE),
        (["/usr/local/bin/ollama", "serve"], OLLAMA),
        (["/home/a/.unsloth/bin/python", "/home/a/.unsloth/bin/unsloth", "studio"], UNSLOTH),
        (["/opt/LM-Studio/lm-studio"], LM_STUDIO),
        (["/bin/sh", "-c", "llama-server -m /models/ollama.gguf"], None),
        ([], None),
    ],
)
def test_a_manager_is_recognised_by_its_command_line(command, manager):
    assert manager_of(command) is manager
