"""The simulator: the real scheduler, with engines that only simulate time."""
