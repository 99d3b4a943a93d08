"""Runs tests that take `manifests` for each installation, and tests that take `build` on both builds."""

from __future__ import annotations

import pytest

from deploy.manifests import INSTALLATIONS, Manifests, rendered
from engine.conftest import build, pytest_generate_tests

__all__ = ["build", "manifests", "pytest_generate_tests"]


@pytest.fixture(params=INSTALLATIONS)
def manifests(request: pytest.FixtureRequest) -> Manifests:
    return rendered(request.param)
