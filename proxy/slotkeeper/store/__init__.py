"""The snapshot store: slot files and manifests, in a hot folder that the engine reads and in a cold tier."""
