"""An engine that `slotkeeper up` starts: its program, its flags for this machine, its process."""
