"""The figures of docs/benchmarks.md that miss their bounds, the worst first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Final

from benchmarks.waiting_figures import ratios, rounds, worst_round

Row = dict[str, Any]

MAX_OF_STOCK: Final = 1.02  # times to first token
MAX_STALL: Final = 1.1  # longest stall of an answer, ÷ stock's
MAX_OF_LEAST: Final = 1.05  # times to first token, ÷ the least possible
MAX_WRITTEN: Final = 1.3  # to the cold folder, ÷ the tokens' bytes
MAX_RESTORE: Final = 1.2  # from there, ÷ the time of a whole file


def above(limit: float, found: Mapping[str, float], *, digits: int = 2) -> str:
    """Return names with the figures above a limit, the worst first; "nothing" if there is none."""
    missed = sorted((figure, name) for name, figure in found.items() if round(figure, digits) > limit)
    return ", ".join(f"{name} {figure:.{digits}f}" for figure, name in reversed(missed)) or "nothing"


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

    def every(model: str) -> str:
        return above(MAX_OF_STOCK, worst((those[0]["work"], median(ratios(those))) for those in quiet[model]))

    def most(limit: float, ours: str, other: str) -> Callable[[str], str]:
        def of_model(model: str) -> str:
            missed = above(limit, worst(_of_round(quiet[model], ours, other)))
            return missed.partition(", ")[0]

        return of_model

    bounds: Mapping[str, Callable[[str], str]] = {
        f"ours ÷ stock, median, at most {MAX_OF_STOCK}": every,
        f"p95 ÷ stock, at most {MAX_OF_STOCK}, worst": most(MAX_OF_STOCK, "ours_p95", "stock_p95"),
        f"longest stall ÷ stock, at most {MAX_STALL}, worst": most(MAX_STALL, "ours_stall", "stock_stall"),
        f"ours ÷ least, at most {MAX_OF_LEAST}, worst": most(MAX_OF_LEAST, "ours_seconds", "least_seconds"),
    }
    return "\n".join(
        f"* {about}: {'; '.join(f'`{model}` {missed(model)}' for model in quiet)}"
        for about, missed in bounds.items()
    )


def _of_round(works: Iterable[Sequence[Row]], ours: str, other: str) -> Iterator[tuple[str, float]]:
    for those in works:
        if pair := worst_round(those, ours, other):
            yield those[0]["work"], pair[0] / pair[1]


def of_profiles(found: Iterable[Row]) -> str:
    """Return the sums of times to first token that miss their bound, and the worst p95."""
    rows = {f"{row['work']} on `{row['profile']}`": row for row in found}
    sums, p95 = (
        above(MAX_OF_STOCK, {name: row[ratio] for name, row in rows.items()}, digits=3)
        for ratio in ("ratio", "p95_ratio")
    )
    return (
        f"* ÷ stock, at most {MAX_OF_STOCK}: {sums}\n"
        f"* p95 ÷ stock, at most {MAX_OF_STOCK}, worst: {p95.partition(', ')[0]}"
    )


def of_cold_bytes(found: Sequence[Row], names: Mapping[str, str]) -> str:
    """Return the models that miss a bound on one of the builds."""
    tiny = [(names[row["model"]], row) for row in found if row["build"]]
    written = worst((name, row["ratio"]) for name, row in tiny if row["ratio"])
    back = worst((name, row["restore_ratio"]) for name, row in tiny)
    return (
        f"* written, at most {MAX_WRITTEN}: {above(MAX_WRITTEN, written)}\n"
        f"* back ÷ whole file, at most {MAX_RESTORE}: {above(MAX_RESTORE, back)}"
    )
