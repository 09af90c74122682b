"""POST /rollout of older Crafter task apps: one request plays a whole rollout and returns it."""
