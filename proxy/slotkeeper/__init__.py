"""Slotkeeper: a sidecar in front of stock llama-server, so that no token is prefilled twice."""

__version__ = "0.7.0"
