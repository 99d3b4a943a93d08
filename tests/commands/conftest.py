"""The engine of commands that need one."""

from engine.conftest import build, engine, pytest_generate_tests

__all__ = ["build", "engine", "pytest_generate_tests"]
