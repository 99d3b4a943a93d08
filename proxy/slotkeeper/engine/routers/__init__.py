"""Servers that load models by name in front of engines: llama-server as a router, and llama-swap."""
