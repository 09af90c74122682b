"""Third-party environments: the environment classes that they share, and one adapter per protocol."""
