"""Trains a policy from the start of a run to its end: iterations, credit and checkpoints."""
