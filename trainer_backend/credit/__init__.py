"""Credit assignment: rewards and advantages of an iteration's rollouts, or of stored ones."""
