"""Rollouts over HTTP: plays the requested episodes, and stores each result until it is acknowledged."""
