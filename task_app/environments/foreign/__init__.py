"""Third-party environments: the environment classes for all of them, and a peer for each protocol."""
