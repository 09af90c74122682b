"""Credit of an iteration: rewards of episodes, advantages, and the same of stored rollouts."""
