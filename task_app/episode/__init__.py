"""One episode: the worker and what it passes through: prompt, action, record, ending."""
