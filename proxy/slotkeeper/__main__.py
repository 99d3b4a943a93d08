"""`python -m slotkeeper`."""

import sys

from slotkeeper.cli import main

sys.exit(main())
