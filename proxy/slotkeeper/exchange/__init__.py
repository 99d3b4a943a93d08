"""The data port: the exchange with a client, and everything that it needs."""
