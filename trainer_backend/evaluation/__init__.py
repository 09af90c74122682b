"""Held-out worlds: playing them, the figures, and published ones beside them."""
