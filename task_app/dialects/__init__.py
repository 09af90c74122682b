"""Protocols of other projects for the same environments; each is a thin layer without state of its own."""
