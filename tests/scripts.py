"""Scripts beside documents and manifests, which are in no package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def loaded(script: Path) -> ModuleType:
    """Return a script as a module of its own name and its folder's."""
    spec = importlib.util.spec_from_file_location(f"{script.parent.name}_{script.stem}", script)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
