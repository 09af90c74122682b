"""Counts, pictures and replays of episodes."""
