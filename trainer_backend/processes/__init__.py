"""Starts, calls and ends the processes of a run. The training loop is in `run/`."""
