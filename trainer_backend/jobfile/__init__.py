"""The job TOML: its tables, how files and `--set` are laid over one another, what is told about it."""
