"""POST /rollout: one call plays a rollout and returns all of it, as users of Crafter task apps know it."""
