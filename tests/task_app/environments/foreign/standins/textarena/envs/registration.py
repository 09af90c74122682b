"""Where the package has its registry."""

ENV_REGISTRY = {"Duel-v0": None, "Guess-v0": None}
