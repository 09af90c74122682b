"""Alembic's entry point: it runs a migration in our connection and transaction."""

from alembic import context

from trainer_backend.store.tables import METADATA

# Our metadata gives indexes and constraints their names. SQLite's DDL is transactional as we drive it.
context.configure(
    connection=context.config.attributes["connection"], target_metadata=METADATA, transactional_ddl=True
)
context.run_migrations()
