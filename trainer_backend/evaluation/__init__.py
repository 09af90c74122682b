"""Evaluation: plays held-out worlds or rows, and computes figures from the episodes."""
