"""Snapshots as bytes: their file format, a cache, and the starts of episodes from a seed or a snapshot."""
