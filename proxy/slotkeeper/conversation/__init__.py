"""Conversations known again: by name and by content, what kind of request each is, and where it parts."""
