"""The shapes on the wire, and nothing that moves: bytes in, values out; no sockets, no clock, no tasks.

What the engine's routes mean, what a request asks for, what an answer said, what our errors look like.
"""
