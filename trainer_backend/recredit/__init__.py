"""Stored rollouts credited anew: estimators beside one another, and one episode decision by decision."""
