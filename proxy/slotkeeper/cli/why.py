"""`slotkeeper why`: explains why a request computed its tokens: first sentences, then the evidence."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from slotkeeper.cli.admin_client import AdminClient, AskedError, admin_port
from slotkeeper.cli.terminal import (
    UNKNOWN,
    Column,
    Row,
    conversation_name,
    fitted,
    lane,
    moment,
    one_line,
    requests,
    say,
    seconds,
    short,
    size,
    span,
    tokens,
    verdict,
    verdict_style,
)
from slotkeeper.conversation.rules.base import Mode
from slotkeeper.observe.standard_error import complain
from slotkeeper.values import UsageError

SHORTEST: Final = 4  # the fewest last letters of an id that may stand for it


async def why(
    id_: str | None,
    out: Console,
    *,
    admin: str | None,
    token: str | None,
    last: int,
    repeated: bool,
    as_json: bool,
    ca: Path | None = None,
) -> int:
    """Print the account of one request, or a list of the last ones.

    Returns 1 if the sidecar does not answer or does not keep that request. Raises UsageError.
    """
    if id_ is not None and repeated:
        raise UsageError("--repeated is for the list: leave the ID out")
    if id_ is not None and len(id_) < SHORTEST:
        raise UsageError(f"{id_!r} is too short: name at least the last {SHORTEST} letters of an ID")
    try:
        async with admin_port(admin, token, ca=ca) as port:
            if id_ is None:
                await _list(port, out, last=last, repeated=repeated, as_json=as_json)
            else:
                await _one(port, out, id_, as_json=as_json)
    except AskedError as error:
        complain("why", str(error))
        return 1
    return 0


async def _one(port: AdminClient, out: Console, id_: str, *, as_json: bool) -> None:
    document = await port.get(f"/api/requests/{quote(id_, safe='')}")
    if as_json:
        say(document)
    else:
        out.print(account(document, out.width, time.time()))


async def _list(port: AdminClient, out: Console, *, last: int, repeated: bool, as_json: bool) -> None:
    found = (await port.get("/api/requests", limit=last, **({"repeated": 1} if repeated else {})))["requests"]
    if as_json:
        for one in found:
            say(one)
    elif found:
        out.print(requests(found, out.width, time.time()))
    else:
        out.print(await _nothing(port, repeated=repeated))


async def _nothing(port: AdminClient, *, repeated: bool) -> str:
    """Return a sentence that says why the list is empty."""
    state = await port.get("/api/state")
    if repeated and (await port.get("/api/requests", limit=1))["requests"]:
        return "None of the last requests computed tokens twice."
    return f"No request has come yet: the sidecar began {span(state['uptime_seconds'])} ago."


# -- one account: the explanation in sentences first -----------------------------------------------------

Document = dict[str, Any]

LANE: Final = 40  # cells of the time line, if there is room
NARROW: Final = 44  # cells of the other columns: names, times, notes
NO_TEXT: Final = "The text is shown if the sidecar runs with --why-text."


def account(document: Document, width: int, now: float) -> Group:
    """Render a document of `/api/requests/{id}`. Sentences are wrapped, tables fitted to `width` cells."""
    parts: list[RenderableType] = [headline(document, now), Text()]
    parts += [
        Text(one_line(line), "bold" if not at else "") for at, line in enumerate(document["explanation"])
    ]
    for title, found in (
        ("Time", timeline(document["timeline"], width)),
        ("Choice", choice(document["choice"], width)),
        ("Where it parts", divergence(document)),
        ("Rules", changes(document["changes"])),
        ("Figures", figures(document)),
    ):
        body = list(found)
        if body:
            parts += [Text(), Text(title, "bold cyan"), *(Padding(one, (0, 0, 0, 2)) for one in body)]
    return Group(*parts)


def headline(document: Document, now: float) -> Text:
    first = Text.assemble((document["id"], "bold"), "  ", (verdict(document), verdict_style(document)), "\n")
    where = f"slot {document['slot']}" if document["slot"] is not None else "no slot known"
    if document["engine"]:
        where += f" of {document['engine']}"
    name = Text(conversation_name(document, now), "bold")
    named = one_line(document["named"]) if document["named"] else ""
    session = f"session {named}" if named and named != document["about"] else ""
    model = f"model {one_line(document['model'])}" if document["model"] else ""
    ended = f"{document['outcome']} {document['status'] or ''}".strip()
    took = seconds(document["seconds"]) if document["seconds"] is not None else ""
    words = [
        moment(document["came"]),
        document["route"],
        model,
        session,
        document["kind"],
        where,
        ended,
        took,
    ]
    return first.append_text(name).append("\n").append(", ".join(filter(None, words)), "dim")


# -- its time line ---------------------------------------------------------------------------------------


def timeline(spans: list[Row], width: int) -> Iterator[RenderableType]:
    if not spans:
        return
    whole = max(span["end"] for span in spans)
    cells = max(8, min(LANE, width - NARROW))

    def drawn(span: Row) -> str:
        return lane(span["begin"], span["end"], whole, cells)

    columns = (
        Column("stage", lambda span: span["stage"], right=False),
        Column("from", lambda span: milliseconds(span["begin"]), keep=1),
        Column("ms", lambda span: milliseconds(span["end"] - span["begin"])),
        Column("", drawn, keep=2, right=False, style="cyan"),
        Column("tokens", lambda span: "" if span["tokens"] is None else tokens(span["tokens"]), keep=3),
        Column("", note, right=False, style="dim"),
    )
    yield fitted(columns, spans, width - 2)


def note(span: Row) -> str:
    """Return a span's note; "" if it only repeats the stage's name."""
    return "" if span["note"] in {"", span["stage"]} else one_line(span["note"])


def milliseconds(value: float) -> str:
    return f"{value * 1e3:,.{int(value < 0.01)}f}"


# -- the choice of a slot --------------------------------------------------------------------------------


def choice(found: Document | None, width: int) -> Iterator[RenderableType]:
    if found is None:
        return
    options = [found["chosen"] | {"taken": True}, *(one | {"taken": False} for one in found["beaten"])]
    engines = len({option["engine"] for option in options}) > 1
    columns = (
        Column("", lambda one: "taken" if one["taken"] else "", right=False, style="green"),
        Column("slot", lambda one: UNKNOWN if one["slot"] is None else str(one["slot"])),
        *([Column("engine", lambda one: one["engine"], keep=2, right=False)] if engines else []),
        Column("decision", lambda one: one["decision"], right=False),
        Column("reuses", lambda one: tokens(one["reuse_tokens"]), keep=3),
        Column("price, tokens", price, keep=4),
        Column("in time", lambda one: seconds(one["price_seconds"])),
        Column("after", lambda one: ", ".join(one["steps"]), right=False),
    )
    yield fitted(columns, options, width - 2)
    if found["held_tokens"]:
        held, common = tokens(found["held_tokens"]), found["common_tokens"]
        shared = f", {tokens(common)} of them the prompt's first" if common is not None else ""
        yield Text(f"It continues from a state of {held} tokens{shared}.")


def price(option: Row) -> str:
    """Return the price of an option in tokens; JSON has no infinity, so an impossible option has no price."""
    amount = option["price_tokens"]
    return tokens(None if amount is None else round(amount))


# -- what the client or a rule changed -------------------------------------------------------------------


def divergence(document: Document) -> Iterator[RenderableType]:
    found = document["parting"]
    if found is None:
        return
    of = f" of {tokens(document['prompt_tokens'])}" if document["prompt_tokens"] is not None else ""
    yield Text(f"Token {tokens(found['token'])}{of}, in the {found['where']}: {found['cause']}")
    text = found["text"]
    if text is None:
        yield Text(NO_TEXT, "dim")
        return
    if text["lead"]:
        yield Text(f"  {one_line(text['lead'])}", "dim")
    yield from _two(text["was"], text["now"])


def changes(found: list[Document]) -> Iterator[RenderableType]:
    for change in found:
        fixed = change["mode"] == Mode.FIX and not change["declined"]
        did = "changed" if fixed else "would have changed"
        rule = change["rule"] or "a repeated note"
        yield Text.assemble((rule, "bold"), f" {did} {one_line(change['path'])}")
        if _has_text(change):
            yield from _two(change["before"], change["after"])
    if found and not any(map(_has_text, found)):
        yield Text(NO_TEXT, "dim")


def _has_text(change: Document) -> bool:
    return bool(change["before"] or change["after"])


def _two(before: str, after: str) -> Iterator[Text]:
    yield Text(f"- {one_line(before)}", "red")
    yield Text(f"+ {one_line(after)}", "green")


# -- figures ---------------------------------------------------------------------------------------------


def figures(document: Document) -> Iterator[RenderableType]:
    """Yield a table with tokens on the left and other figures on the right."""
    counts = [
        (name.replace("_", " "), tokens(document[name]))
        for name in (
            *("prompt_tokens", "reused", "prepared", "computed", "planted", "oracle"),
            *("repeated", "lost_tokens", "cached", "predicted", "generated"),
        )
    ]
    others = [
        ("first token", seconds(document["first_token_seconds"])),
        ("longest stall", seconds(document["stall_seconds"])),
        ("answered", seconds(document["seconds"])),
        ("time saved", seconds(document["saved_seconds"])),
        ("body", size(document["body_bytes"])),
        ("client", short(document["client"]) or UNKNOWN),
    ]
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 3, 0, 0))
    for justify in ("left", "right", "left", "right"):
        table.add_column(justify=justify, no_wrap=True)
    for at, (name, value) in enumerate(counts):
        table.add_row(name, value, *(others[at] if at < len(others) else ("", "")))
    yield table
