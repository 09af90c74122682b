"""Rollouts over HTTP: requests become episodes, and their results wait until they are acknowledged."""
