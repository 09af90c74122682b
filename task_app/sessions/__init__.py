"""Environments and policies that clients step, and a journal that restores them after a restart."""
