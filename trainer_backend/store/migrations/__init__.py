"""The versions of the store's tables; store/database.py migrates to them."""
