"""The thin shell around the scheduler: it performs effects and reports outcomes as events."""
