"""Write the Homebrew formula of a release: `python deploy/homebrew/formula.py --help`.

Homebrew builds each dependency from its source archive. Their addresses come from a file in the format of
pylock.toml, which `uv pip compile --format pylock.toml` writes from pyproject.toml; versions and hashes must
be those of requirements/image.lock, with which the image is built and the tests run: `make packages`.
"""
# ruff: noqa: INP001 - a script, not a package

from __future__ import annotations

import argparse
import hashlib
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from packaging.markers import Marker

TEMPLATE: Final = Path(__file__).with_name("slotkeeper.rb")
LOCKED: Final = Path(__file__).parents[2] / "requirements" / "image.lock"
SYSTEMS: Final = (  # on which Homebrew runs
    {"sys_platform": "darwin", "platform_system": "Darwin", "os_name": "posix"},
    {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"},
)
PYTHON: Final = {"python_version": "3.13", "python_full_version": "3.13.0"}
CPYTHON: Final = {"platform_python_implementation": "CPython", "implementation_name": "cpython"}


class FormulaError(Exception):
    """The formula cannot be written; the message says why."""


def resources(packages: Sequence[Mapping[str, Any]], locked: str) -> Iterator[str]:
    """Yield a resource for each package that Homebrew's systems need. Raises FormulaError.

    `locked`: the text of image.lock, which must have each version and hash.
    """
    for package in packages:
        name, version, source = package["name"], package.get("version"), package.get("sdist")
        if not wanted(package.get("marker")):
            continue
        if source is None:
            raise FormulaError(f"{name} has no source archive")
        digest = source["hashes"]["sha256"]
        if f"sha256:{digest}" not in _entry(locked, name, version):
            raise FormulaError(f"{name} {version} is not the one of {LOCKED.name}")
        yield f'  resource "{name}" do\n    url "{source["url"]}"\n    sha256 "{digest}"\n  end'


def _entry(locked: str, name: str, version: str) -> str:
    """Return the lines of a version in image.lock; empty if it has another."""
    head = rf"^{re.escape(name)}(?:\[[^\]]*\])?=={re.escape(version)}(?=[ \n])"
    found = re.search(rf"{head}.*?(?=^\S|\Z)", locked, re.MULTILINE | re.DOTALL)
    return found[0] if found else ""


def wanted(marker: str | None) -> bool:
    """Whether a package is needed on a system on which Homebrew runs."""
    return marker is None or any(
        Marker(marker).evaluate({**system, **PYTHON, **CPYTHON}) for system in SYSTEMS
    )


def formula(values: Mapping[str, str]) -> str:
    """Return the template with its placeholders filled. Raises FormulaError if one stays."""
    text = re.sub(r"\{\{(\w+)\}\}", lambda found: values.get(found[1], found[0]), TEMPLATE.read_text("utf-8"))
    text = text.partition("\n")[2]  # the first line is about the template
    if left := re.search(r"\{\{\w+\}\}", text):
        raise FormulaError(f"no value for {left[0]}")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Write the Homebrew formula of a release to standard output."
    )
    parser.add_argument("--pylock", type=Path, required=True, help="the dependencies, as uv resolved them")
    parser.add_argument("--source", type=Path, required=True, help="the release's source archive")
    parser.add_argument("--url", required=True, help="where that archive will be")
    parser.add_argument("--homepage", required=True)
    args = parser.parse_args(argv)
    packages = tomllib.loads(args.pylock.read_text("utf-8"))["packages"]
    try:
        listed = "\n\n".join(resources(packages, LOCKED.read_text("utf-8")))
        digest = hashlib.sha256(args.source.read_bytes()).hexdigest()
        values = {"homepage": args.homepage, "url": args.url, "sha256": digest, "resources": listed}
        sys.stdout.write(formula(values))
    except FormulaError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
