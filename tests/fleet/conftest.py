"""Fixtures of a fleet; see `parts`."""

from __future__ import annotations

from engine.conftest import engine_factory
from fleet.parts import pods

__all__ = ["engine_factory", "pods"]
