"""The command line: `slotkeeper COMMAND`."""
