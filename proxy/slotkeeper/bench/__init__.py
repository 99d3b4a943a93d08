"""Measuring: tiny models, replayed sessions, the demo, the simulator."""
