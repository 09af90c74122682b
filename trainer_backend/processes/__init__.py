"""The processes of a run: how each is started, called and ended. The loop is in `run/`."""
