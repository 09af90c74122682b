"""One episode: the worker, and its prompts, actions, records and endings."""
