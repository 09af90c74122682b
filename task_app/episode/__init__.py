"""Plays one episode: `worker` contains the loop, and the other modules make prompts, actions and records."""
