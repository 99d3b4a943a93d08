"""Answers of the engine: reading a stream, assembling it, its figures, and how clients send replies back."""
