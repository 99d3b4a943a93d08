"""What the sidecar costs and what it saves, measured on this machine: `python -m benchmarks`."""
