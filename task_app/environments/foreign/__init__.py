"""Third-party environments: one environment class, and a peer for each protocol."""
