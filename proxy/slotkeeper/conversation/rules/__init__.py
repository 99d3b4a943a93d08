"""Canonical rules: they restore what an agent changes in its history, and tell new values at the end."""
