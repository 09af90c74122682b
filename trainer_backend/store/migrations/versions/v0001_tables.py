"""The first version, whose tables copied the runs' files. New databases begin with version 2.

`tests/trainer_backend/store/version_1.py` defines these tables.
"""

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Do nothing: version 2 creates all tables, or converts the existing tables of version 1."""


def downgrade() -> None:
    """Do nothing: the downgrade of version 2 has dropped all tables."""
