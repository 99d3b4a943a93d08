"""The llama-server behind us: talking to it, reading its traits, starting it."""
