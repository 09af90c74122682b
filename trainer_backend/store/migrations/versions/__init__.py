"""One file per version, `vNNNN_what.py`, with `upgrade`, `downgrade` and the previous version."""
