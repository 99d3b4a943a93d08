"""The output of benchmarks: a console for tables, and a JSON file to compare the next run with."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any, Final

import orjson
from rich.console import Console

from slotkeeper import __version__

FOLDER: Final = Path("artifacts") / "benchmarks"
BUILDS: Final = ("b10434", "b11549")  # of the engine; the older first
WIDTH: Final = 118

# Output to a file is not cut to 80 columns.
console: Final = Console(width=None if Console().is_terminal else WIDTH, soft_wrap=False)


def documented(name: str, figures: Any) -> dict[str, Any]:
    """Return figures with the facts that are needed to compare runs."""
    return {
        "benchmark": name,
        "version": __version__,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],  # other work on the machine makes times worthless
        "figures": figures,
    }


def keep(name: str, figures: Any) -> None:
    """Write `figures` to artifacts/benchmarks/NAME.json."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_bytes(orjson.dumps(documented(name, figures), option=orjson.OPT_INDENT_2))
    console.print(f"[dim]{path}[/dim]")
