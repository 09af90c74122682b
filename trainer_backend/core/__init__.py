"""The pure core: credit, batches and losses as functions of trajectories. No I/O."""
