"""How long a test waits for a condition. A wait that succeeds early costs nothing, so it is long.

Wait for a condition, never for a time: a step of a millisecond takes a second on a busy machine. Only a check
that something does *not* happen waits for a time.
"""

from typing import Final

PATIENCE: Final = 120.0  # seconds until a wait counts as failed; a whole test has 600 (pyproject.toml)
