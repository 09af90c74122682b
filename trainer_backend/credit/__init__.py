"""Credit assignment: computes rewards and advantages, during training or later from stored rollouts."""
