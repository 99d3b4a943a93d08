"""The bodies and answers of each API family, and the chat body that llama-server makes of them."""
