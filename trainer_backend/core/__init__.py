"""The pure core: functions of their arguments, from trajectories to credit, batches and losses. No I/O."""
