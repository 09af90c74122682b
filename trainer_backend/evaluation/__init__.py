"""Held-out worlds: playing them, and the figures."""
