"""The task app: serves environments over HTTP, and plays episodes with them. It needs no torch."""
