"""The figures of docs/benchmarks.md that miss their bounds, the worst first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Final

from benchmarks.waiting_figures import ratios, rounds, worst_round

Row = dict[str, Any]

MAX_OF_STOCK: Final = 1.02  # times to first token
MAX_STALL: Final = 1.1  # longest stall of an answer, ÷ stock's
MAX_OF_LEAST: Final = 1.05  # times to first token, ÷ the least possible
MAX_WRITTEN: Final = 1.3  # to the cold folder, ÷ the tokens' bytes
MAX_RESTORE: Final = 1.2  # from there, ÷ the time of a whole file
WORST: Final = (  # bounds of which the worst work is named
    ("p95 ÷ stock", MAX_OF_STOCK, "ours_p95", "stock_p95"),
    ("longest stall ÷ stock", MAX_STALL, "ours_stall", "stock_stall"),
    ("ours ÷ least", MAX_OF_LEAST, "ours_seconds", "least_seconds"),
)


def above(limit: float, found: Mapping[str, float], *, digits: int = 2, most: int | None = None) -> str:
    """Return `most` names, or all, with the figures above a limit, the worst first; "nothing" without any."""
    missed = sorted((figure, name) for name, figure in found.items() if round(figure, digits) > limit)
    shown = [f"{name} {figure:.{digits}f}" for figure, name in reversed(missed)]
    return ", ".join(shown[:most]) or "nothing"


def worst(found: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the largest figure of each name."""
    most: dict[str, float] = {}
    for name, figure in found:
        most[name] = max(figure, most.get(name, figure))
    return most


def of_waiting(found: Iterable[Row]) -> str:
    """Return a line for each bound of the fat models, without busy loops."""
    quiet: dict[str, list[Sequence[Row]]] = {}
    for those in rounds(found):
        if not those[0]["busy"]:
            quiet.setdefault(those[0]["model"], []).append(those)
    medians = {model: above(MAX_OF_STOCK, _medians(works)) for model, works in quiet.items()}
    lines = [_line(f"ours ÷ stock, median, at most {MAX_OF_STOCK}", medians)]
    for about, limit, ours, other in WORST:
        missed = {model: above(limit, _worst(works, ours, other), most=1) for model, works in quiet.items()}
        lines.append(_line(f"{about}, at most {limit}, worst", missed))
    return "\n".join(lines)


def _line(about: str, missed: Mapping[str, str]) -> str:
    return f"* {about}: {'; '.join(f'`{model}` {what}' for model, what in missed.items())}"


def _medians(works: Iterable[Sequence[Row]]) -> dict[str, float]:
    return worst((those[0]["work"], median(ratios(those))) for those in works)


def _worst(works: Iterable[Sequence[Row]], ours: str, other: str) -> dict[str, float]:
    pairs = ((those[0]["work"], worst_round(those, ours, other)) for those in works)
    return worst((work, pair[0] / pair[1]) for work, pair in pairs if pair)


def of_profiles(found: Iterable[Row]) -> str:
    """Return the sums of times to first token that miss their bound, and the worst p95."""
    rows = {f"{row['work']} on `{row['profile']}`": row for row in found}
    sums = above(MAX_OF_STOCK, {name: row["ratio"] for name, row in rows.items()}, digits=3)
    p95 = above(MAX_OF_STOCK, {name: row["p95_ratio"] for name, row in rows.items()}, digits=3, most=1)
    return f"* ÷ stock, at most {MAX_OF_STOCK}: {sums}\n* p95 ÷ stock, at most {MAX_OF_STOCK}, worst: {p95}"


def of_cold_bytes(found: Sequence[Row], names: Mapping[str, str]) -> str:
    """Return the models that miss a bound on one of the builds."""
    tiny = [(names[row["model"]], row) for row in found if row["build"]]
    written = worst((name, row["ratio"]) for name, row in tiny if row["ratio"])
    back = worst((name, row["restore_ratio"]) for name, row in tiny)
    return (
        f"* written, at most {MAX_WRITTEN}: {above(MAX_WRITTEN, written)}\n"
        f"* back ÷ whole file, at most {MAX_RESTORE}: {above(MAX_RESTORE, back)}"
    )
