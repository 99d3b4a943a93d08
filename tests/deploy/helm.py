"""Helm as a program: `python helm.py CHART < request.json > answer.json`, by its library from PyPI.

It is a process of its own because the library starts the runtime of Go, with its threads and signal handlers.
"""

from __future__ import annotations

import json
import sys

import helm_python


def main() -> None:
    request = json.load(sys.stdin)
    values = request["values"] | helm_python.parse_set_string(",".join(request["sets"]))
    report = helm_python.lint(sys.argv[1], values, strict=True, kube_version=request["kubernetes"])
    with helm_python.Chart.load(sys.argv[1]) as chart:
        chart.validate_schema(values)
        rendered = chart.render(values, name=request["release"], namespace=request["namespace"])
    json.dump({"lint": report, "rendered": rendered}, sys.stdout)


if __name__ == "__main__":
    main()
