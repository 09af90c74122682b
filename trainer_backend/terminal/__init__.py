"""The command line's output and commands."""
