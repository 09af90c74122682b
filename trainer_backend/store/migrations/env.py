"""What Alembic runs for a migration: our connection, in the transaction that it is in."""

from alembic import context

from trainer_backend.store.tables import Base

# With our metadata its names of indexes and constraints go along. SQLite can undo DDL too, as we drive it.
context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    transactional_ddl=True,
)
context.run_migrations()
