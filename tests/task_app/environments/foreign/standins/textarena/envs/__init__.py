"""The games of other modules."""
