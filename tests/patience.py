"""How long a test waits for what must happen. A wait that is met early costs nothing, so it is long.

Wait for a condition, never for a time: what takes a millisecond on a quiet machine takes a second beside two
others. Only what must *not* happen is given a time, which then costs that time.
"""

from typing import Final

PATIENCE: Final = 120.0  # seconds until a wait counts as failed; a whole test has 600 (pyproject.toml)
