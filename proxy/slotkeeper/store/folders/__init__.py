"""Folders of snapshots on this machine: plain files (hot), or states cut into shared parts (cold)."""
