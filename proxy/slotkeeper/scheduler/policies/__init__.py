"""Rules that some sidecars need: priorities, a shared KV buffer, keys kept apart, LoRA, routers, drains."""
