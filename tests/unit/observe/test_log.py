"""Log lines: one each, in the style that was asked for, and never with a word of a prompt."""

from __future__ import annotations

import contextlib
import json
import logging

import aiohttp
import pytest
import structlog

from chaos.conftest import ready, settings
from chaos.fake_answers import PATHS, request_body
from chaos.fake_engine import FakeEngine, Fault
from slotkeeper.app import running
from slotkeeper.observe.log import configure, get_logger
from slotkeeper.runtime import render
from slotkeeper.wire.answer import AnswerReader

WORD = "Xylophonkonzert"  # stands in every prompt below, and in no code
STYLES = pytest.mark.parametrize("style", ["json", "console"])


@pytest.fixture(autouse=True)
def as_before():
    """`configure` holds on to the streams of the test that called it."""
    root = logging.getLogger()
    handlers = list(root.handlers)
    yield
    root.handlers[:] = handlers
    structlog.reset_defaults()


def fails_over(prompt: str) -> None:
    body = {"messages": [{"content": prompt}]}
    raise LookupError(len(body))


def test_json_is_one_object_a_line_with_the_time_and_the_level(capsys):
    configure("info", "json")
    get_logger("x").info("request", slot=1, engine="http://e")
    line = json.loads(capsys.readouterr().err)
    assert {key: line[key] for key in ("event", "level", "slot", "engine")} == {
        "event": "request",
        "level": "info",
        "slot": 1,
        "engine": "http://e",
    }
    assert line["timestamp"].endswith("Z")


def test_console_is_for_people(capsys):
    configure("info", "console")
    get_logger("x").info("request", slot=1)
    said = capsys.readouterr().err
    assert "request" in said
    with pytest.raises(json.JSONDecodeError):
        json.loads(said)


def test_auto_is_json_where_nobody_looks(capsys):
    configure("info", "auto")
    get_logger("x").info("request")
    assert json.loads(capsys.readouterr().err)["event"] == "request"


@pytest.mark.parametrize(
    ("level", "heard"),
    [
        ("debug", ["debug", "info", "warning", "error"]),
        ("info", ["info", "warning", "error"]),
        ("warning", ["warning", "error"]),
        ("error", ["error"]),
    ],
)
def test_a_level_lets_through_itself_and_what_is_worse(level, heard, capsys):
    configure(level, "json")
    for name in ("debug", "info", "warning", "error"):
        getattr(get_logger("x"), name)("said")
    assert [json.loads(line)["level"] for line in capsys.readouterr().err.splitlines()] == heard


@STYLES
def test_a_traceback_shows_the_way_but_no_variable(style, capsys):
    configure("info", style)
    try:
        fails_over(WORD)
    except LookupError:
        get_logger("x").exception("parse_failed")
    said = capsys.readouterr().err
    assert "LookupError" in said
    assert "fails_over" in said
    assert WORD not in said


@STYLES
@pytest.mark.parametrize("breaks", [None, (render, "prompt_of"), (AnswerReader, "feed")])
async def test_no_word_of_a_prompt_or_an_answer_is_ever_logged(style, breaks, capsys, monkeypatch):
    def bug(*_args, **_more) -> None:
        raise RuntimeError("a bug")

    configure("debug", style)
    if breaks:
        monkeypatch.setattr(*breaks, bug)
    async with FakeEngine() as fake, running(settings(fake.base, drain_timeout=1.0)) as sidecar:
        await ready(sidecar)
        async with aiohttp.ClientSession(f"http://{sidecar.addresses[0]}") as client:
            for api, path in PATHS.items():
                for fault in (Fault.NONE, Fault.DIE_IN_STREAM):
                    fake.script.append(fault)
                    body = request_body(api, stream=True, text=f"{WORD} for {api}")
                    with contextlib.suppress(aiohttp.ClientError):
                        async with client.post(path, json=body) as answer:
                            await answer.read()
            broken = b'{"messages": [{"role": "user", "content": "' + WORD.encode()
            async with client.post(PATHS[next(iter(PATHS))], data=broken) as answer:
                await answer.read()
    said = capsys.readouterr().err
    assert "answer_broke_off" in said
    assert "unreadable_request" in said
    assert not breaks or "a bug" in said
    assert WORD not in said
