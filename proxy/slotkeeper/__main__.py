"""`python -m slotkeeper`."""

import sys

from slotkeeper.cli.main import main

sys.exit(main())
