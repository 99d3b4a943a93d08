"""Why each of the last requests computed what it computed: kept, put into words, and shown."""
