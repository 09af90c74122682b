"""A file a version, `vNNNN_what.py`: `upgrade`, `downgrade`, and which version stands before it."""
