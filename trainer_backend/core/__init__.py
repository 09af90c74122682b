"""Pure functions that compute credit, batches and losses from trajectories. No I/O."""
