"""The versions of the store's tables; schema_version.py goes up and down them."""
