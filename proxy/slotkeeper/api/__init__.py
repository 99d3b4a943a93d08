"""Parses requests and answers of every API, and writes our errors: bytes in, values out.

Nothing here uses a socket, a clock or a task.
"""
