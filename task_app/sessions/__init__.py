"""Environments and policies that a client steps itself, and what a kill must not lose of them."""
