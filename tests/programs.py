"""Programs that tests drive and pip does not bring: a browser, Prometheus, an image builder."""

from __future__ import annotations

import os
import shutil

import pytest


def program(*names: str) -> str:
    """The path of the first that is there. Else a test is skipped; in CI, which must install it, it fails."""
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        missing = f"{' or '.join(names)} is not installed here"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    return found
