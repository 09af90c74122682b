"""Sessions on disk: written before they are answered, and brought back after a kill."""
