"""A run from its command to its end: what starts it, what stops it, what an iteration gathered."""
