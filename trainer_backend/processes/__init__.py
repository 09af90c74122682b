"""The processes of a run: starts, calls and ends each of them. The training loop is in `run/`."""
