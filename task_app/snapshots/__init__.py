"""Snapshots as bytes: their envelope, a cache of them, and the starts of episodes from them."""
