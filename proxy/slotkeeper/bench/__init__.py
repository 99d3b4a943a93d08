"""Measuring: tiny models, replayed sessions, the demo."""
