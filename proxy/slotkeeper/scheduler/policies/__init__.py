"""Optional parts of the scheduler: priorities, a shared KV buffer, keys kept apart, LoRA, routers, drains."""
