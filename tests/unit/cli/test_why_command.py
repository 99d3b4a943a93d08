"""`slotkeeper why`: the answer first, then its reasons; no text of a client is read as markup."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from slotkeeper.admin.admin import detail, summary
from slotkeeper.cli.main import main
from slotkeeper.cli.terminal import COLUMNS
from slotkeeper.cli.why import NO_TEXT, why
from slotkeeper.conversation.rules.base import Mode
from slotkeeper.observe.request_record import Decision, Option
from slotkeeper.scheduler.types import Reason
from unit.looking import Document, admin, change, ended, lost, record, rewritten, state

NO_SERVER = "http://127.0.0.1:1"
EVIL = "\x1b[2J[red]bold\r\x07\u202e"  # clears the terminal, rings the bell, and reverses the text behind it


@pytest.fixture
def ask(capsys):
    """Run the command on an admin port with these documents; return the exit code and the output."""

    async def run(
        documents: dict[str, Document], id_: str | None = None, *, width: int = 120, **given
    ) -> tuple[int, str]:
        options: dict[str, Any] = {"token": None, "last": 20, "repeated": False, "as_json": False} | given
        out = io.StringIO()
        async with admin(documents) as said:
            code = await why(id_, Console(file=out, width=width), admin=said.url, **options)
        run.asked = said.asked  # type: ignore[attr-defined]
        return code, out.getvalue() + "".join(capsys.readouterr())

    return run


def listed(*records) -> dict[str, Document]:
    return {"/api/requests": {"requests": [summary(one) for one in records]}, "/api/state": state()}


def document_of(found, **more) -> dict[str, Document]:
    return {f"/api/requests/{found.request_id}": detail(found) | more}


def line(out: str, start: str) -> str:
    return next(text for text in out.splitlines() if text.strip().startswith(start))


# -- the list ------------------------------------------------------------------------------------------


async def test_the_list_has_a_line_with_figures_and_a_verdict_for_each_request(ask):
    code, out = await ask(listed(rewritten(2), lost(1)), width=180)
    assert code == 0
    head, *lines = out.splitlines()
    assert head.split() == [column.head for column in COLUMNS]
    named = "opencode #3: Fix the importer"
    assert [text.split(named)[0].split()[1] for text in lines] == ["00000002", "00000001"]
    assert [text.split(named)[1].split()[:6] for text in lines] == [
        ["main_turn", "12,000", "20", "11,980", "11,980", "11,400"],
        ["main_turn", "12,000", "3,000", "9,000", "1,000", "8,000"],
    ]
    assert "a date changed" in lines[0]
    assert lines[1].split()[-4:] == ["ms", "-", "cache:", "overwritten"]


@pytest.mark.parametrize("width", [40, 60, 80, 132])
async def test_a_narrow_terminal_gets_fewer_but_complete_columns(ask, width):
    _, out = await ask(listed(rewritten(2), lost(1)), width=width)
    head, *lines = (text.rstrip() for text in out.splitlines())
    assert all(len(text) <= width for text in (head, *lines))
    assert len(lines) == 2
    assert {"id", "computed", "verdict"} <= set(head.split())
    assert "…" not in head
    assert "00000002" in lines[0]
    assert ("conversation" in head) == (width >= 60)
    assert ("oracle" in head) == (width >= 132)


async def test_running_and_failed_requests_show_their_state(ask):
    _, out = await ask(listed(record(2), ended(1, outcome="client_gone", prompt_tokens=None)))
    running, gone = out.splitlines()[1:]
    assert running.rstrip().endswith("running")
    assert gone.rstrip().endswith("client_gone")


async def test_the_number_and_kind_of_requests_are_asked_of_the_sidecar(ask):
    await ask(listed(rewritten()), last=7, repeated=True)
    assert ask.asked == ["/api/requests?limit=7&repeated=1"]


async def test_the_json_list_has_one_line_for_each_request(ask):
    documents = listed(rewritten(2), lost(1))
    code, out = await ask(documents, as_json=True)
    assert code == 0
    assert [json.loads(text) for text in out.splitlines()] == documents["/api/requests"]["requests"]


async def test_an_empty_list_is_explained(ask):
    figures = state()["totals"] | {"requests": 0}
    code, out = await ask({"/api/requests": {"requests": []}, "/api/state": state(totals=figures)})
    assert code == 0
    assert "began 2 h ago" in out


async def test_an_empty_json_list_has_no_line(ask):
    assert await ask(listed(), as_json=True) == (0, "")


# -- one request ---------------------------------------------------------------------------------------


async def test_the_explanation_of_a_request_comes_before_its_details(ask):
    found = rewritten()
    document = detail(found)
    code, out = await ask(document_of(found), found.request_id, width=200)
    assert code == 0
    parts = found.request_id, *document["explanation"], "Time", "Choice", "Where it parts", "Figures"
    places = [out.index(part) for part in parts]
    assert places == sorted(places)
    assert "slot 1 of http://127.0.0.1:8081, ok 200, 1.2 s" in out


async def test_each_stage_shows_its_milliseconds_and_its_place_in_the_total_time(ask):
    _, out = await ask(document_of(rewritten()), "request-00000001")
    assert line(out, "parse").split() == ["parse", "0.0", "1.0", "█"]
    assert line(out, "plant").split() == ["plant", "250", "500", "█" * 20, "500"]
    plant, prefill = line(out, "plant"), line(out, "prefill")
    assert plant.rindex("█") + 1 == prefill.index("█")


async def test_the_chosen_slot_is_listed_above_the_alternatives_with_both_costs(ask):
    _, out = await ask(document_of(rewritten()), "request-00000001")
    assert line(out, "taken").split() == ["taken", "1", "prefix", "20", "11,980", "12.0", "s", "plant"]
    assert line(out, "0  cold").split() == ["0", "cold", "0", "12,345", "12.3", "s"]
    assert "a state of 11,500 tokens, 20 of them the prompt's first" in out


async def test_a_missing_cost_is_shown_as_a_dash(ask):
    never = Option(reason=Reason.COLD, engine="http://b:1", slot=None, reuse=None, price=1.0)
    document = detail(ended(decision=Decision(chosen=never)))
    document["choice"]["chosen"]["price_tokens"] = None
    _, out = await ask({"/api/requests/request-00000001": document}, "request-00000001")
    assert line(out, "taken").split() == ["taken", "-", "cold", "-", "-", "-"]


async def test_engines_are_named_if_there_is_more_than_one(ask):
    here, there = (
        Option(reason=Reason.COLD, engine=engine, slot=0, reuse=0, price=1.0)
        for engine in ("http://a:1", "http://b:1")
    )
    _, out = await ask(
        document_of(ended(decision=Decision(chosen=here, beaten=(there,), rate=1.0))), "request-00000001"
    )
    assert "http://a:1" in line(out, "taken")
    assert "http://b:1" in out


async def test_the_first_token_that_differs_is_shown_with_the_text_around_it(ask):
    found = rewritten()
    document = detail(found)
    document["parting"]["text"] = {"lead": "Today is\n", "was": "Monday", "now": ""}
    _, out = await ask({f"/api/requests/{found.request_id}": document}, found.request_id)
    assert "Token 20 of 12,000, in the system text (message 1): date" in out
    at = out.index("Today is\\n")
    assert out[at:].split()[2:6] == ["-", "Monday", "+", "(nothing)"]
    assert NO_TEXT not in out


async def test_the_setting_that_shows_text_is_named_if_there_is_none(ask):
    _, out = await ask(document_of(rewritten(changes=(change(Mode.FIX, "", ""),))), "request-00000001")
    assert out.count(NO_TEXT) == 2
    assert "date changed messages[0].content" in out


async def test_a_change_that_a_rule_only_observed_is_marked_as_such(ask):
    _, out = await ask(
        document_of(rewritten(changes=(change(Mode.OBSERVE, "May", "June"),))), "request-00000001"
    )
    assert "date would have changed messages[0].content" in out
    assert "- May\n" in out.replace(" \n", "\n").replace("  ", "")


async def test_a_request_that_has_just_arrived_shows_no_details(ask):
    code, out = await ask(document_of(record()), "request-00000001")
    assert code == 0
    assert "It has not ended yet." in out
    assert not any(title in out for title in ("Time\n", "Choice\n", "Where it parts\n", "Rules\n"))


@pytest.mark.parametrize("width", [30, 60, 80])
async def test_the_explanation_of_a_request_is_never_wider_than_the_terminal(ask, width):
    _, out = await ask(
        document_of(rewritten(changes=(change(Mode.FIX, "x" * 90, "y" * 90),))),
        "request-00000001",
        width=width,
    )
    assert max(map(len, out.splitlines())) <= width


async def test_the_json_output_of_one_request_is_one_line(ask):
    found = rewritten()
    code, out = await ask(document_of(found), found.request_id, as_json=True)
    assert (code, out.count("\n")) == (0, 1)
    assert json.loads(out) == detail(found)


async def test_control_characters_and_markup_in_client_text_are_escaped(ask):
    found = rewritten(named=EVIL, changes=(change(Mode.FIX, EVIL, EVIL),))
    document = detail(found)
    document["parting"]["text"] = {"lead": EVIL, "was": EVIL, "now": EVIL}
    _, out = await ask({"/api/requests/last": document}, "last", width=200)
    assert out.count(r"\x1b[2J[red]bold\r\x07\u202e") == 6
    assert not set(EVIL) & set(out) - set("[2J[red]bold")


# -- failures ------------------------------------------------------------------------------------------


async def test_an_unknown_request_id_is_a_failure(ask):
    assert await ask({}, "nonsense") == (1, "slotkeeper why: there is none\n")


async def test_a_request_id_is_quoted_as_one_part_of_the_path(ask):
    await ask({}, "../state?x=#y")
    assert ask.asked == ["/api/requests/..%2Fstate%3Fx%3D%23y"]


@pytest.mark.parametrize(
    ("words", "hint"),
    [(["abc"], "name at least the last 4 letters"), (["last", "--repeated"], "leave the ID out")],
)
def test_an_id_that_is_too_short_or_not_alone_is_a_usage_error(words, hint, capsys):
    assert main(["why", "--admin", NO_SERVER, *words]) == 2
    assert hint in capsys.readouterr().err
