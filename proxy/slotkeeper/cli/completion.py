"""`slotkeeper completion`: the scripts that complete its command line in a shell.

`python docs/generate.py` writes them from the parser, so that no installation needs the library that does it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import slotkeeper

FOLDER: Final = Path(slotkeeper.__file__).parent / "completions"
FILES: Final[Mapping[str, str]] = {  # of each shell, under the names that packages install
    "bash": "slotkeeper.bash",
    "zsh": "_slotkeeper",
    "fish": "slotkeeper.fish",
}


def script(shell: str) -> str:
    """Return the script for a shell. KeyError for a shell without one."""
    return (FOLDER / FILES[shell]).read_text("utf-8")
