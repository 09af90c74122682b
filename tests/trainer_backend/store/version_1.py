"""The tables of version 1: jobs, and copies of metrics, rollouts, decisions, checkpoints and ledgers."""

import sqlalchemy as sa
from alembic.migration import MigrationContext
from alembic.operations import Operations

from trainer_backend.store.tables import METADATA, UtcDateTime


def _of_job(*, primary_key: bool = False) -> sa.Column[int]:
    reference = sa.ForeignKey("jobs.number", ondelete="CASCADE")
    return sa.Column("job", sa.Integer, reference, nullable=False, primary_key=primary_key)


def create(connection: sa.Connection) -> None:
    """Make them in an empty database, whose naming convention is that of the migrations."""
    context = MigrationContext.configure(connection, opts={"target_metadata": METADATA})
    op = Operations(context)
    _jobs(op)
    _metrics(op)
    _rollouts(op)
    _decisions(op)
    _training(op)
    connection.execute(sa.text("INSERT INTO alembic_version VALUES ('0001')"))


def _jobs(op: Operations) -> None:
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
        sa.Column("idempotency_key", sa.Text),
        sa.Column("body_hash", sa.Text),
        sa.Column("tags", sa.JSON, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("created", UtcDateTime, nullable=False),
        sa.Column("started", UtcDateTime),
        sa.Column("ended", UtcDateTime),
        sa.Column("code", sa.Text),
        sa.Column("detail", sa.Text),
        sa.Column("version", sa.Integer, nullable=False),
        sa.UniqueConstraint("home", "idempotency_key", name="uq_jobs_home_idempotency_key"),
        sqlite_autoincrement=True,
    )


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


def _rollouts(op: Operations) -> None:
    op.create_table(
        "synced_files",
        sa.Column("number", sa.Integer, primary_key=True),
        _of_job(),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("modified_ns", sa.BigInteger, nullable=False),
        sa.Column("digest", sa.Text),
        sa.Column("decisions", sa.Boolean, nullable=False),
        sa.Index(None, "job", "name", unique=True),
    )
    op.create_table(
        "rollouts",
        sa.Column("number", sa.Integer, primary_key=True),
        _of_job(),
        sa.Column(
            "file", sa.Integer, sa.ForeignKey("synced_files.number", ondelete="CASCADE"), nullable=False
        ),
        sa.Column("rollout_id", sa.Text, nullable=False),
        sa.Column("stage", sa.Text, nullable=False),
        sa.Column("iteration", sa.Integer, nullable=False),
        sa.Column("group_id", sa.Text, nullable=False),
        sa.Column("sibling", sa.Integer, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("policy", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("seed", sa.BigInteger),
        sa.Column("outcome_reward", sa.Double),
        sa.Column("reward", sa.Double),
        sa.Column("unique_achievements", sa.Integer),
        sa.Column("decisions", sa.Integer, nullable=False),
        sa.Column("env_steps", sa.Integer),
        sa.Column("stop_reason", sa.Text),
        sa.Column("failure_code", sa.Text),
        sa.Index(None, "file", "rollout_id", unique=True),
        sa.Index(None, "job", "rollout_id"),
        sa.Index(None, "job", "stage", "iteration"),
        sa.Index(None, "job", "outcome_reward"),
        sa.Index(None, "job", "group_id"),
        sa.Index("ix_rollouts_job_number", "job", "number"),
        sa.Index("ix_rollouts_job_reward", "job", "reward"),
        sa.Index("ix_rollouts_job_unique_achievements", "job", "unique_achievements"),
        sa.Index("ix_rollouts_job_decisions", "job", "decisions"),
        sa.Index(
            "ix_rollouts_facets",
            "job",
            "stage",
            "policy",
            "status",
            "failure_code",
            "stop_reason",
            "iteration",
        ),
    )


def _decisions(op: Operations) -> None:
    op.create_table(
        "decisions",
        sa.Column(
            "rollout", sa.Integer, sa.ForeignKey("rollouts.number", ondelete="CASCADE"), primary_key=True
        ),
        sa.Column("turn", sa.Integer, primary_key=True),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("unique_delta", sa.Integer, nullable=False),
        sa.Column("ach_delta", sa.Integer, nullable=False),
        sa.Column("unique", sa.JSON, nullable=False),
        sa.Column("env_reward", sa.Double, nullable=False),
        sa.Column("reward", sa.Double),
        sa.Column("return_to_go", sa.Double),
        sa.Column("advantage", sa.Double),
        sa.Column("state_key", sa.Text),
        sa.Column("invalid_reason", sa.Text),
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
