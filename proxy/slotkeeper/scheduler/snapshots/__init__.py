"""Snapshots of slots: which may be offered, which are kept, and how many bytes they may take."""
