"""What plays in the process of another library, with a Python of its own; it imports nothing of Turnwise."""
