"""Plays one episode: the loop (`worker`), its prompts, its actions, the records of its steps, and its end."""
