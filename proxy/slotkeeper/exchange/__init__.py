"""The data port: one exchange with a client, and all that it needs."""
