"""The first version, whose tables copied the runs' files. New databases begin with version 2.

`tests/trainer_backend/store/version_1.py` has its tables.
"""

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Do nothing: version 2 makes all tables, or converts those of version 1."""


def downgrade() -> None:
    """Do nothing: version 2 drops all tables."""
