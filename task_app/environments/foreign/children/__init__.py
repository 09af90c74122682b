"""Programs that run another library with its own Python; they import nothing of Turnwise."""
