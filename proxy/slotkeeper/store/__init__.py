"""Slot files and their manifests, in a hot folder that the engine reads and a cold one."""
