"""One file per version, `vNNNN_what.py`: `upgrade`, `downgrade`, and the version before it."""
