"""The report of `slotkeeper bench`: as a table, as Markdown, as one page of HTML, and two reports compared.

All of these are made from the JSON alone, which holds no prompt, path or address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

import orjson

from slotkeeper.bench.measure import ratio, seconds
from slotkeeper.values import UsageError

Report = Mapping[str, Any]
LARGEST: Final = 4 << 20  # bytes of a report that is read


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of all ways."""

    name: str  # in the JSON
    about: str
    shown: Callable[[Any], str]
    plotted: bool = False


def _count(value: Any) -> str:
    return "-" if value is None else f"{value:,}"


def _size(value: Any) -> str:
    return "-" if value is None else f"{value / 2**20:,.0f} MiB"


def _energy(value: Any) -> str:
    return "-" if value is None else f"{value:,.0f} Ws"


ROWS: Final = (
    Row("slots", "slots of the engine", _count),
    Row("requests", "requests", _count),
    Row("failed", "failed", _count),
    Row("not_started", "rounds in which it did not start", _count),
    Row("waited_seconds", "waited: sum of the times to first tokens", seconds, plotted=True),
    Row("first_token_p50", "time to first token, median", seconds),
    Row("first_token_p95", "time to first token, 95th percentile", seconds),
    Row("stall_seconds", "longest stall of a streamed answer", seconds),
    Row("waited_ratio", "tokens computed while clients waited ÷ least possible", ratio, plotted=True),
    Row("total_ratio", "the same with idle time", ratio),
    Row("prompt_tokens", "prompt tokens", _count),
    Row("computed_tokens", "computed while clients waited", _count),
    Row("least_tokens", "least possible", _count),
    Row("written_bytes", "written to disk", _size),
    Row("engine_bytes", "memory of the engine, most", _size),
    Row("sidecar_bytes", "memory of the proxy, most", _size),
    Row("sidecar_seconds", "processor time of the proxy", seconds),
    Row("watt_seconds", "energy of the machine", _energy),
)
NOTE: Final = (
    "Tokens are the engine's own counts; the least possible is what any cache must compute of the prompts as "
    "the agents wrote them, so rules may get below it. Times are the client's. A dash means unknown."
)


def rows(report: Report) -> Iterator[tuple[Row, list[str]]]:
    """Yield each figure that at least one way knows, as the cells of all ways."""
    for row in ROWS:
        values = [way.get(row.name) for way in report["ways"].values()]
        if any(value is not None for value in values):
            yield row, [row.shown(value) for value in values]


def headline(report: Report) -> str:
    """Return on what the figures were measured, in one sentence."""
    engine, machine = report["engine"], report["machine"]
    rounds = "1 round" if report["rounds"] == 1 else f"{report['rounds']} rounds"
    return (
        f"{engine['model']} on llama-server {engine['build']}; "
        f"{machine['processor']}, {machine['cores']} cores; {rounds} of the same work by each way; "
        f"Slotkeeper {report['slotkeeper']}, {report['date']}."
    )


def markdown(report: Report) -> str:
    """Return the report for an issue or a page."""
    head = ("", *report["ways"])
    lines = [headline(report), "", _line(head), "|---" * len(head) + "|"]
    lines += [_line((row.about, *cells)) for row, cells in rows(report)]
    return "\n".join([*lines, "", NOTE, ""])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


# -- HTML ------------------------------------------------------------------------------------------------

STYLE: Final = """
:root { color-scheme: light dark; --text: #1b1f24; --muted: #59636e; --line: #d1d9e0; --bar: #8c959f;
  --ours: #1a7f64; --page: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --muted: #9198a1; --line: #3d444d;
  --bar: #656c76; --ours: #3fb68b; --page: #0d1117; } }
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; } p { color: var(--muted); }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child { text-align: left; } tbody th { font-weight: 400; }
td { font-variant-numeric: tabular-nums; white-space: nowrap; }
figure { margin: 0; } .way { display: grid; grid-template-columns: 11rem 1fr 5rem; gap: .6rem;
  align-items: center; margin: .3rem 0; }
.way span:last-child { text-align: right; font-variant-numeric: tabular-nums; }
.track { background: color-mix(in srgb, var(--line) 45%, transparent); border-radius: 3px; height: 1.1rem; }
.bar { background: var(--bar); border-radius: 3px; height: 100%; } .ours .bar { background: var(--ours); }
@media (max-width: 40rem) { .way { grid-template-columns: 1fr 4.5rem; }
  .way .track { grid-column: 1 / -1; grid-row: 2; } }
"""


def page(report: Report) -> str:
    """Return the report as one HTML page without any other file; it follows light and dark."""
    head = "".join(f"<th scope=col>{escape(way)}</th>" for way in report["ways"])
    body = "".join(
        f"<tr><th scope=row>{escape(row.about)}</th>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for row, cells in rows(report)
    )
    plots = "".join(_plot(report, row) for row in ROWS if row.plotted)
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>slotkeeper bench</title><style>{STYLE}</style>"
        f"<h1>Slotkeeper beside stock llama-server</h1><p>{escape(headline(report))}</p>{plots}"
        f"<h2>All figures</h2><div class=wide><table><thead><tr><th></th>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div><p>{escape(NOTE)}</p></html>\n"
    )


def _plot(report: Report, row: Row) -> str:
    values = {way: figures.get(row.name) for way, figures in report["ways"].items()}
    most = max((value for value in values.values() if value), default=0)
    if not most:
        return ""
    bars = "".join(
        f"<div class='way{' ours' if way.startswith('Slotkeeper') else ''}'><span>{escape(way)}</span>"
        f"<div class=track><div class=bar style='width:{100 * (value or 0) / most:.1f}%'></div></div>"
        f"<span>{escape(row.shown(value))}</span></div>"
        for way, value in values.items()
    )
    return f"<h2>{escape(row.about[0].upper() + row.about[1:])}</h2><figure>{bars}</figure>"


# -- files -----------------------------------------------------------------------------------------------


def written(report: Report, name: Path) -> list[Path]:
    """Write the report beside each other as JSON, Markdown and HTML; return the files. Raises UsageError."""
    texts = {
        ".json": orjson.dumps(report, option=orjson.OPT_INDENT_2).decode() + "\n",
        ".md": markdown(report),
        ".html": page(report),
    }
    files = [name.with_name(name.name + ending) for ending in texts]
    try:
        for file, text in zip(files, texts.values(), strict=True):
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--report: {error.filename}: {error.strerror}") from None
    return files


def read(path: Path) -> Report:
    """Read a report. Raises UsageError for a file that is none."""
    try:
        with path.open("rb") as file:
            found = orjson.loads(file.read(LARGEST))
        if all(isinstance(way, dict) for way in found["ways"].values()):
            headline(found)
            return dict(found)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        pass
    raise UsageError(f"{path} is no report of `slotkeeper bench`: give the .json file of one")


def compared(one: Report, other: Report) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield way, figure, both values and the second ÷ the first, for what both reports know."""
    for way in one["ways"]:
        for row in ROWS:
            first, second = (report["ways"].get(way, {}).get(row.name) for report in (one, other))
            if first is None or second is None:
                continue
            times = f"{second / first:.2f}" if first else "-"
            yield way, row.about, row.shown(first), row.shown(second), times
