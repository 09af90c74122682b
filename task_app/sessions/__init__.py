"""Environments and policies that a client steps itself, and their journal, which survives a kill."""
