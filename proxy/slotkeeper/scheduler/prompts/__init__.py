"""Prompts as token ids: where they diverge from each other, and where checkpoints are worth making."""
