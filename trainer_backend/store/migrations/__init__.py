"""The versions of the store's tables. `store.database.migrate` applies them."""
