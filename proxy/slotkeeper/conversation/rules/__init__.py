"""Canonical rules: what an agent changes in its own past is put back, and what is new is told at the end."""
