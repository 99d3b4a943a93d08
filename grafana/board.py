"""The dashboard: its variables and its rows."""

from __future__ import annotations

import json
from typing import Final

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from grafana import rows
from grafana.panels import SOURCE

UID: Final = "slotkeeper"
INFO: Final = "slotkeeper_build_info"  # every sidecar exports it from its start

ROWS: Final = {
    "Overview": rows.headline,
    "Tokens": rows.tokens,
    "Models": rows.models,
    "Latency": rows.latency,
    "Slots and queue": rows.slots,
    "Snapshots": rows.snapshots,
    "Rules": rows.rules,
    "Trouble": rows.trouble,
}


def written() -> str:
    """Return the dashboard as JSON that Grafana can import or provision."""
    board = (
        dashboard.Dashboard("Slotkeeper")
        .uid(UID)
        .description("Shows whether prompt tokens are prefilled twice, and why.")
        .tags(["llama.cpp", "slotkeeper"])
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .refresh("30s")
        .time("now-6h", "now")
        .readonly()
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_label("job", f"label_values({INFO}, job)"))
        .with_variable(_label("instance", f'label_values({INFO}{{job=~"$job"}}, instance)'))
    )
    for title, panels in ROWS.items():
        board = board.with_row(dashboard.Row(title))
        for panel in panels():
            board = board.with_panel(panel)
    built = board.build()
    for number, placed in enumerate(built.panels or (), start=1):
        placed.id_val = number
    return json.dumps(built, cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _label(name: str, query: str) -> dashboard.QueryVariable:
    """Return a variable with the values of a label; the default is all of them."""
    return (
        dashboard.QueryVariable(name)
        .label(name.capitalize())
        .datasource(SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(multi=True)
        .include_all(include_all=True)
        .all_value(".*")
        .current(VariableOption(text="All", value="$__all", selected=True))
    )
