"""Alembic's entry point, which runs a migration in the connection and transaction of `migrate`."""

from alembic import context

from trainer_backend.store.tables import METADATA

# METADATA names indexes and constraints. SQLite's DDL is transactional, because `_begin_sqlite` in
# store/database.py, instead of the driver, begins transactions.
context.configure(
    connection=context.config.attributes["connection"], target_metadata=METADATA, transactional_ddl=True
)
context.run_migrations()
