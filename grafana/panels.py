"""Functions that make the dashboard's panels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from grafana_foundation_sdk.builders import common as looks
from grafana_foundation_sdk.builders import dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    GraphTresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE: Final = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
COLUMNS: Final = 24  # width of Grafana's grid
TALL: Final = 8  # heights, in rows of that grid
FLAT: Final = 4
EXEMPLARS: Final = " Diamonds are single requests; `slotkeeper why ID` explains one."

Panel = Builder[models.Panel]
Queries = Mapping[str, str]  # legend -> expression
Steps = Sequence[tuple[float | None, str]]  # (lower bound, colour); the lowest has no bound


def number(
    title: str,
    about: str,
    queries: Queries,
    *,
    unit: str = "short",
    steps: Steps = ((None, "text"),),
    decimals: int | None = None,
) -> stat.Panel:
    """Return a panel with one figure for the whole time range."""
    panel = (
        stat.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .unit(unit)
        .height(FLAT)
        .span(COLUMNS // 6)
        .thresholds(_thresholds(steps))
        .graph_mode(BigValueGraphMode.NONE)
        .color_mode(BigValueColorMode.VALUE)
        .reduce_options(looks.ReduceDataOptions().calcs(["lastNotNull"]))
        .no_value("-")
    )
    for query in _queries(queries):
        panel = panel.with_target(query.instant())
    return panel if decimals is None else panel.decimals(decimals)


def lines(
    title: str,
    about: str,
    queries: Queries,
    *,
    unit: str = "short",
    width: int = COLUMNS // 3,
    stacked: bool = False,
    exemplars: bool = False,
    limit: float | None = None,
) -> timeseries.Panel:
    """Return a panel of series over time. `limit` is drawn as a line; values above it are bad."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(about + (EXEMPLARS if exemplars else ""))
        .datasource(SOURCE)
        .unit(unit)
        .min(0)
        .height(TALL)
        .span(width)
        .fill_opacity(30 if stacked else 0)
        .legend(_legend())
        .tooltip(looks.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
        .no_value("nothing in this time")
    )
    for query in _queries(queries):
        panel = panel.with_target(query.range().exemplar(exemplars))
    if stacked:
        panel = panel.stacking(looks.StackingConfig().mode(StackingMode.NORMAL))
    if limit is not None:
        panel = panel.thresholds(_thresholds(((None, "green"), (limit, "red")))).thresholds_style(
            looks.GraphThresholdsStyleConfig().mode(GraphTresholdsStyleMode.LINE)
        )
    return panel


def density(title: str, about: str, buckets: str, *, unit: str) -> heatmap.Panel:
    """Return a heatmap of a histogram over time. `buckets` keeps the label `le`."""
    (query,) = _queries({"{{le}}": buckets})
    return (
        heatmap.Panel()
        .title(title)
        .description(about + EXEMPLARS)
        .datasource(SOURCE)
        .height(TALL)
        .span(COLUMNS // 2)
        .with_target(query.range().format(PromQueryFormat.HEATMAP).exemplar(exemplar=True))
        .color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges").steps(64))
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .show_tooltip()
        .filter_values(heatmap.FilterValueRange().le(1e-9))
    )


def _queries(queries: Queries) -> list[prometheus.Dataquery]:
    return [
        prometheus.Dataquery().expr(expr).legend_format(legend).ref_id(chr(ord("A") + number))
        for number, (legend, expr) in enumerate(queries.items())
    ]


def _thresholds(steps: Steps) -> dashboard.ThresholdsConfig:
    made = [models.Threshold(value=value, color=color) for value, color in steps]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(made)


def _legend() -> looks.VizLegendOptions:
    return (
        looks.VizLegendOptions()
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(show_legend=True)
    )
