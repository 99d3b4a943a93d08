"""Every package that an installation brings has a licence that allows us to pass it on."""

from __future__ import annotations

import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

LOCKED = Path(__file__).parents[2] / "requirements" / "image.lock"
ALLOWED = {
    *(
        "0BSD",
        "Apache-2.0",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "CC0-1.0",
        "CNRI-Python",
        "ISC",
        "MIT",
        "MIT-0",
        "PSF-2.0",
        "Zlib",
    ),
    "MPL-2.0",  # of files that stay as they are
}
SPDX = {  # what older metadata call them
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}


def locked() -> list[str]:
    """Names of the packages that are installed on this platform."""
    lines = re.findall(r"^[\w.-]+==[^\\\n]+", LOCKED.read_text("utf-8"), re.MULTILINE)
    found = (Requirement(line) for line in lines)
    return [wanted.name for wanted in found if wanted.marker is None or wanted.marker.evaluate()]


def licences(package: Distribution) -> set[str]:
    """Its SPDX names; of alternatives all, since each of ours is allowed."""
    told: Any = package.metadata
    if expression := told.get("License-Expression"):
        return set(re.split(r" AND | OR |[() ]+", expression)) - {""}
    kinds = [
        kind for kind in told.get_all("Classifier", []) if kind.startswith("License :: OSI Approved :: ")
    ]
    names = [kind.rpartition(" :: ")[2] for kind in kinds] or told.get("License", "none").splitlines()[:1]
    return {SPDX.get(name, name) for name in names}


@pytest.mark.parametrize("name", locked())
def test_the_licence_of_each_package_is_allowed(name):
    try:
        package = distribution(name)
    except PackageNotFoundError:
        pytest.fail(f"{name} is in {LOCKED.name}, but not in the environment of the tests")
    assert licences(package) <= ALLOWED


def test_the_lock_file_is_read():
    assert {"aiohttp", "orjson", "tiktoken"} <= set(locked())
