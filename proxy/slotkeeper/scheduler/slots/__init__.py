"""The slots of an engine: which request has each, what it holds, and what the engine will reuse of it."""
