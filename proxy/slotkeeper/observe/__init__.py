"""Observation: metrics, the log, spans, recordings and the journal of requests."""
