"""`make test` as a new contributor runs it: in fresh clones of the last commit, with an empty environment.

    python tests/rehearse.py 10                            ten times, one after the other
    python tests/rehearse.py 2 --busy 2                    beside two busy loops
    python tests/rehearse.py 2 --bare                      without the optional programs
    PYTEST_ARGS="-k wire" python tests/rehearse.py 1       a part of it

Prints the commit, the seeds, the summaries and the failures. Exit code 1 if a run failed: its folder is kept.
"""

# ruff: noqa: S607, T201 - a script

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))

from benchmarks.busy import busy_loops  # noqa: E402 - found by the line above

OPTIONAL = (
    "buildah",
    "chrom",
    "curl",
    "debootstrap",
    "haproxy",
    "nginx",
    "openssl",
    "prom",
    "redis-",
)  # beginnings of the names of variables
SAID = re.compile(
    r"^(Using --randomly-seed=.*|(FAILED|ERROR) .*|=+ .*(passed|failed|error).* =+|make: .*)$", re.MULTILINE
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("times", type=int, nargs="?", default=1)
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="busy loops beside it")
    parser.add_argument("--bare", action="store_true", help="optional programs are not on PATH")
    args = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="rehearse-"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the busy loops too
    red = 0
    with busy_loops(args.busy):
        for number in range(1, args.times + 1):
            began = time.monotonic()
            code = rehearse(home / str(number), bare=args.bare)
            red += bool(code)
            minutes = (time.monotonic() - began) / 60
            print(f"run {number}: {'red' if code else 'green'}, {minutes:.1f} minutes\n", flush=True)
    if red:
        print(f"{red} of {args.times} were red, see {home}")
    else:
        shutil.rmtree(home)
    return 1 if red else 0


def rehearse(folder: Path, *, bare: bool) -> int:
    folder.mkdir()
    clone, output = folder / "slotkeeper", folder / "output.txt"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone)], check=True)
    print(subprocess.check_output(["git", "log", "-1", "--format=%h %s"], cwd=clone, text=True), end="")
    path = without_optional(folder / "bin") if bare else os.environ["PATH"]
    with output.open("wb") as out:
        wanted = [f"PYTEST_ARGS={words}"] if (words := os.environ.get("PYTEST_ARGS")) else []
        environ = {"PATH": path, "HOME": str(Path.home())}
        done = subprocess.run(
            ["make", "test", *wanted], cwd=clone, env=environ, stdout=out, stderr=out, check=False
        )
    print(*(found[0] for found in SAID.finditer(output.read_text("utf-8", "replace"))), sep="\n")
    if not done.returncode:
        shutil.rmtree(folder)
    return done.returncode


def without_optional(folder: Path) -> str:
    """Make a folder with all programs of PATH except the optional ones."""
    folder.mkdir()
    for place in filter(Path.is_dir, map(Path, os.environ["PATH"].split(os.pathsep))):
        for program in place.iterdir():
            link = folder / program.name
            if not program.name.startswith(OPTIONAL) and not link.is_symlink():
                link.symlink_to(program)
    python = folder / "python3"  # the program on PATH may be a script that depends on its own location
    python.unlink(missing_ok=True)
    python.symlink_to(Path(sys.executable).resolve())
    return str(folder)


if __name__ == "__main__":
    sys.exit(main())
