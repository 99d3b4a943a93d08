"""What the APIs of llama-server say: pure parsers of requests and of answers."""
