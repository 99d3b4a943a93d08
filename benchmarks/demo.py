"""The output of `slotkeeper demo` on this machine: `python -m benchmarks.demo`. README.md shows it."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.figures import console, keep


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.parse_args(arguments)
    command = [sys.executable, "-m", "slotkeeper", "demo"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603 - our own
    console.print(done.stdout, highlight=False, markup=False)
    if done.returncode == 0:
        keep("demo", [{"printed": done.stdout}])
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(main())
