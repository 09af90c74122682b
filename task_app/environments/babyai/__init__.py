"""BabyAI from the package minigrid: missions in a grid world, of which the agent sees only a part."""
