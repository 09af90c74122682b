"""A run from its start to its end: iterations, checkpoints, the server of its policy."""
