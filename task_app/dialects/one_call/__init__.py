"""POST /rollout: one call, the whole trajectory back, as users of Crafter task apps know it."""
