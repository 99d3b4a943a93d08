"""Benchmarks of what the sidecar costs and saves on this machine: `python -m benchmarks`."""
