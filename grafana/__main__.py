"""Write the dashboard and the rules, also those of the Prometheus operator: `python -m grafana [--check]`.

With `--check` nothing is written, and the exit code is 1 if a file is out of date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from grafana import board, rules

HERE: Final = Path(__file__).parent
HEAD: Final = "# Written by `python -m grafana`; change grafana/rules.py instead.\n"


def _yaml(document: dict[str, Any]) -> str:
    return HEAD + yaml.safe_dump(document, sort_keys=False, width=1000)


FILES: Final[Mapping[str, Callable[[], str]]] = {
    "dashboards/slotkeeper.json": board.written,
    "prometheus/recording.yaml": lambda: _yaml(rules.recording()),
    "prometheus/alerts.yaml": lambda: _yaml(rules.alerts()),
    "../deploy/k8s/components/prometheus/prometheusrule.yaml": lambda: _yaml(rules.for_operator()),
    # Charts read no files outside their folder.
    "../deploy/k8s/helm/slotkeeper/files/prometheusrule.yaml": lambda: _yaml(rules.for_operator()),
    "../deploy/k8s/helm/slotkeeper/files/dashboard.json": board.written,
}


def main(argv: Sequence[str] | None = None, folder: Path = HERE) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m grafana", description="Write the dashboard and the rules."
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a file is out of date"
    )
    args = parser.parse_args(argv)
    stale = []
    for name, write in FILES.items():
        path, text = folder / name, write()
        if path.is_file() and path.read_text("utf-8") == text:
            continue
        stale.append(name)
        if not args.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
    if stale and args.check:
        sys.stderr.write(f"out of date: {', '.join(stale)}; run `python -m grafana`\n")
    return int(bool(stale and args.check))


if __name__ == "__main__":
    raise SystemExit(main())
