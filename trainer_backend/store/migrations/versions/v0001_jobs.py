"""Jobs."""

import sqlalchemy as sa
from alembic import op

from trainer_backend.store.column_types import UtcDateTime

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False, index=True),
        sa.Column("wanted", sa.Text, nullable=False),
        sa.Column("config", sa.Text, nullable=False),
        sa.Column("run_dir", sa.Text, unique=True),
        sa.Column("run_id", sa.Text),
        sa.Column("origin", sa.Text, nullable=False),
        sa.Column("home", sa.Text, nullable=False),
        sa.Column("idempotency_key", sa.Text, unique=True),
        sa.Column("body_hash", sa.Text),
        sa.Column("tags", sa.JSON, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("created", UtcDateTime, nullable=False),
        sa.Column("started", UtcDateTime),
        sa.Column("ended", UtcDateTime),
        sa.Column("code", sa.Text),
        sa.Column("detail", sa.Text),
        sa.Column("version", sa.Integer, nullable=False),
        sqlite_autoincrement=True,
    )


def downgrade() -> None:
    op.drop_table("jobs")
