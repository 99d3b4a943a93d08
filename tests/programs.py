"""Programs that tests run: a browser, Prometheus, an image builder, and programs that pip installs."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import pytest


def program(*names: str) -> str:
    """Return the path of the first name that is found; programs that pip installed come first.

    Without one a test is skipped; in CI, which must install it, it fails.
    """
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    found = next(filter(None, (shutil.which(name, path=path) for name in names)), None)
    return found or missing(" or ".join(names))


def missing(name: str) -> NoReturn:
    """Skip a test without this program, or fail in CI."""
    reason = f"{name} is not installed here"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
