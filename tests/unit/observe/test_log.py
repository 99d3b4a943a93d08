"""Log lines: one per event, in the chosen format, and never with text of a prompt."""

from __future__ import annotations

import contextlib
import json
import logging

import aiohttp
import pytest
from aiohttp.http_exceptions import BadHttpMessage, InvalidURLError

from chaos.conftest import ready, settings
from chaos.fake_answers import PATHS, request_body
from chaos.fake_engine import FakeEngine, Fault
from slotkeeper.api.answers.answer import AnswerReader
from slotkeeper.api.head import Api
from slotkeeper.app import running
from slotkeeper.engine.answers import EngineError, EngineGoneError
from slotkeeper.exchange import exchange
from slotkeeper.observe.log import SELDOM_SECONDS, Seldom, configure, get_logger, sayable
from slotkeeper.scheduler.types import RequestId, id_of
from slotkeeper.store.trouble import UnfitError

WORD = "Xylophonkonzert"  # is in every prompt below, and in no code
STYLES = pytest.mark.parametrize("style", ["json", "console"])


def fails_over(prompt: str) -> None:
    body = {"messages": [{"content": prompt}]}
    raise LookupError(len(body))


def breaks_over(error: Exception) -> None:
    try:
        raise error
    except type(error) as cause:
        raise RuntimeError("a bug") from cause


def test_json_output_is_one_object_on_each_line_with_time_and_level(capsys):
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


@STYLES
def test_no_field_shows_what_looks_like_a_key(capsys, style):
    configure("info", style)
    key = "sk-proj-0123456789abcdefghij"
    get_logger("x").info("request_refused", error=f"model '{key}' not found", name=key)
    said = capsys.readouterr().err
    assert key not in said
    assert "***" in said


def test_console_output_is_text_and_not_json(capsys):
    configure("info", "console")
    get_logger("x").info("request", slot=1)
    said = capsys.readouterr().err
    assert "request" in said
    with pytest.raises(json.JSONDecodeError):
        json.loads(said)


def test_the_automatic_format_is_json_without_a_terminal(capsys):
    configure("info", "auto")
    get_logger("x").info("request")
    assert json.loads(capsys.readouterr().err)["event"] == "request"


@pytest.mark.parametrize(
    ("level", "logged"),
    [
        ("debug", ["debug", "info", "warning", "error"]),
        ("info", ["info", "warning", "error"]),
        ("warning", ["warning", "error"]),
        ("error", ["error"]),
    ],
)
def test_a_log_level_passes_itself_and_more_severe_levels(level, logged, capsys):
    configure(level, "json")
    for name in ("debug", "info", "warning", "error"):
        getattr(get_logger("x"), name)("said")
    assert [json.loads(line)["level"] for line in capsys.readouterr().err.splitlines()] == logged


@STYLES
def test_a_traceback_shows_functions_but_no_variables(style, capsys):
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
@pytest.mark.parametrize(
    "error",
    [KeyError(WORD), ValueError(WORD), EngineError(500, WORD), BadHttpMessage(WORD), InvalidURLError(WORD)],
)
def test_an_error_that_may_quote_a_prompt_is_logged_without_its_text(style, error, capsys):
    configure("info", style)
    try:
        breaks_over(error)
    except RuntimeError:
        get_logger("x").exception("parse_failed")
    said = capsys.readouterr().err
    assert "RuntimeError: a bug" in said
    assert said.index(type(error).__name__) < said.index("RuntimeError: a bug"), "the cause stands first"
    assert WORD not in said


def test_errors_that_cause_each_other_are_logged_once(capsys):
    configure("info", "json")
    first, second = RuntimeError("one"), RuntimeError("two")
    first.__cause__, second.__cause__ = second, first
    get_logger("x").error("task_failed", exc_info=first)
    told = json.loads(capsys.readouterr().err)["exception"]
    assert told.count("RuntimeError: one") == told.count("RuntimeError: two") == 1


@pytest.mark.parametrize(
    ("error", "logged"),
    [
        (EngineError(500, WORD), "EngineError: 500"),
        (EngineGoneError(WORD), "EngineGoneError"),
        (ValueError(WORD), "ValueError"),
        (UnfitError("not these bytes"), "UnfitError: not these bytes"),
        (OSError(28, "No space left on device"), "OSError: [Errno 28] No space left on device"),
    ],
)
def test_only_safe_error_texts_are_logged(error, logged):
    assert sayable(error) == logged


@STYLES
def test_log_lines_of_libraries_have_the_same_format(style, capsys):
    root = logging.getLogger()
    root.handlers.clear()
    configure("info", style)
    logging.getLogger("aiohttp.server").warning("odd: %s", 1)
    said = capsys.readouterr().err
    assert "odd: 1" in said
    if style == "json":
        line = json.loads(said)
        assert (line["level"], line["logger"], line["event"]) == ("warning", "aiohttp.server", "odd: 1")


def test_a_repeated_warning_is_logged_at_once_and_then_rarely_with_a_count(capsys, monkeypatch):
    configure("info", "json")
    clock = [1000.0]
    monkeypatch.setattr("slotkeeper.observe.log.time.monotonic", lambda: clock[0])
    seldom = Seldom(get_logger("x"))
    for _ in range(5):
        seldom.warning("not_recorded", error="full")
    clock[0] += SELDOM_SECONDS
    seldom.warning("not_recorded", error="full")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["unsaid"] for line in lines] == [0, 4]


@pytest.mark.parametrize(("key", "known_as"), [("17:a:b", "a:b"), ("chore:3@1.5", "chore:3@1.5"), ("", "")])
def test_a_request_is_logged_under_the_id_that_its_client_knows(key, known_as):
    assert id_of(RequestId(key)) == known_as


@STYLES
@pytest.mark.parametrize("breaks", [None, (exchange, "prompt_of"), (AnswerReader, "feed")])
async def test_no_text_of_a_prompt_or_an_answer_is_ever_logged(style, breaks, capsys, monkeypatch):
    def bug(*_args, **_more) -> None:
        raise RuntimeError("a bug")

    configure("debug", style)
    refusal = {"error": {"code": 400, "message": WORD, "type": "invalid_request_error"}}
    monkeypatch.setattr("chaos.fake_engine.error", lambda _: refusal)
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
            fake.broken = dict.fromkeys(("/apply-template", PATHS[Api.CHAT]), 400)
            async with client.post(
                PATHS[Api.CHAT], json=request_body(Api.CHAT, stream=False, text=f"{WORD} " * 100)
            ) as answer:
                assert WORD in await answer.text(), "the engine's refusal quotes it"
            broken = b'{"messages": [{"role": "user", "content": "' + WORD.encode()
            for data in (broken, b'{"messages": ["' + WORD.encode() + b'"]}'):
                async with client.post(PATHS[Api.CHAT], data=data) as answer:
                    await answer.read()
    said = capsys.readouterr().err
    assert "answer_broke_off" in said
    for event in ("request_refused", "unreadable_request", "a bug" if breaks else "not_rendered"):
        assert event in said
    assert WORD not in said
