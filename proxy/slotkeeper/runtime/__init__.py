"""The thin shell around the core: it performs effects and reports outcomes as events."""
