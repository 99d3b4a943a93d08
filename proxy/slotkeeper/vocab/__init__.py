"""Exact token ids: read from the GGUF where we can, asked of the engine where we cannot."""
