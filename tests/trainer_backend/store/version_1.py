"""The tables of version 1: jobs, and copies of metrics, rollouts, decisions, checkpoints and ledgers."""

import sqlalchemy as sa
from alembic.migration import MigrationContext
from alembic.operations import Operations

from trainer_backend.store.migrations.versions import v0002_files as v2
from trainer_backend.store.tables import METADATA, UtcDateTime


def _of_job(*, primary_key: bool = False) -> sa.Column[int]:
    reference = sa.ForeignKey("jobs.number", ondelete="CASCADE")
    return sa.Column("job", sa.Integer, reference, nullable=False, primary_key=primary_key)


def create(connection: sa.Connection) -> None:
    """Make them in an empty database, whose naming convention is that of the migrations."""
    context = MigrationContext.configure(connection, opts={"target_metadata": METADATA})
    op = Operations(context)
    op.create_table("jobs", *v2.job_columns_of_1(), sqlite_autoincrement=True)
    _metrics(op)
    op.create_table("synced_files", *v2.file_columns_of_1(), *v2.needed(sa.Boolean, "decisions"))
    op.create_table("rollouts", *v2.rollout_columns_of_1())
    _decisions(op)
    _training(op)
    connection.execute(sa.text("INSERT INTO alembic_version VALUES ('0001')"))


def _metrics(op: Operations) -> None:
    op.create_table(
        "metric_rows",
        sa.Column("number", sa.Integer, primary_key=True),
        _of_job(),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("iteration", sa.Integer, nullable=False),
        sa.Column("row", sa.JSON, nullable=False),
        sa.Index(None, "job", "kind", "iteration", unique=True),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "curves",
        sa.Column("number", sa.Integer, primary_key=True),
        _of_job(),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Index(None, "job", "kind", "name", unique=True),
    )
    op.create_table(
        "metrics",
        sa.Column("curve", sa.Integer, sa.ForeignKey("curves.number", ondelete="CASCADE"), primary_key=True),
        sa.Column("iteration", sa.Integer, primary_key=True),
        sa.Column("value", sa.Double, nullable=False),
        sqlite_with_rowid=False,
    )


def _decisions(op: Operations) -> None:
    op.create_table(
        "decisions",
        sa.Column(
            "rollout", sa.Integer, sa.ForeignKey("rollouts.number", ondelete="CASCADE"), primary_key=True
        ),
        sa.Column("turn", sa.Integer, primary_key=True),
        *v2.needed(sa.Text, "action"),
        *v2.needed(sa.Integer, "unique_delta", "ach_delta"),
        *v2.needed(sa.JSON, "unique"),
        *v2.needed(sa.Double, "env_reward"),
        *v2.optional(sa.Double, "reward", "return_to_go", "advantage"),
        *v2.optional(sa.Text, "state_key", "invalid_reason"),
        sqlite_with_rowid=False,
    )


def _training(op: Operations) -> None:
    op.create_table(
        "iterations",
        _of_job(primary_key=True),
        sa.Column("iteration", sa.Integer, primary_key=True),
        sa.Column("policy_version", sa.Integer),
        sa.Column("finished", UtcDateTime, nullable=False),
    )
    op.create_table(
        "checkpoints",
        _of_job(primary_key=True),
        sa.Column("folder", sa.Text, primary_key=True),
        sa.Column("iteration", sa.Integer, nullable=False),
        sa.Column("best", sa.Boolean, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "consumed",
        _of_job(primary_key=True),
        sa.Column("planned", sa.Text, primary_key=True),
        sa.Column("rollout_id", sa.Text, nullable=False),
        sa.Column("iteration", sa.Integer, nullable=False),
        sa.Index(None, "job", "iteration"),
    )
