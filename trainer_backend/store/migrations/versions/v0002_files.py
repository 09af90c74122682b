"""Drops the tables that only copied files of runs, such as metrics and decisions; adds columns to jobs."""

import math
import re
from typing import Any

import sqlalchemy as sa
import tomli
from alembic import op
from sqlalchemy.schema import SchemaItem

from trainer_backend.store.tables import UtcDateTime

revision = "0002"
down_revision = "0001"

_SORTS = ("number", "outcome_reward", "reward", "unique_achievements", "decisions")
_FACETS = ("job", "stage", "policy", "status", "failure_code", "stop_reason", "iteration")
# Tables of version 1 whose content is also in the files of the runs.
_DROPPED = ("consumed", "checkpoints", "iterations", "decisions", "metrics", "curves", "metric_rows")


def _job_columns() -> tuple[sa.Column[Any], ...]:
    return (
        sa.Column("environment", sa.Text, nullable=False, server_default=""),
        sa.Column("model", sa.Text, nullable=False, server_default=""),
        sa.Column("iteration", sa.Integer, nullable=False, server_default="0"),
        sa.Column("finished", UtcDateTime),
        sa.Column("numbers", sa.JSON, nullable=False, server_default="{}"),
        sa.Column("outcome", sa.Double),
        sa.Column("evaluation", sa.Double),
    )


def _mark_columns() -> tuple[sa.Column[Any], ...]:
    return (
        sa.Column("base", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("rows", sa.Integer, nullable=False, server_default="0"),
    )


def _place_column() -> sa.Column[int]:
    return sa.Column("place", sa.Integer, nullable=False, server_default="0")


_JOBS = sa.table("jobs", sa.column("number", sa.Integer), sa.column("config", sa.Text), *_job_columns())
# Keys of [retention] that were removed together with the table of decisions. A queued job that still
# contains them must not fail.
_DECISIONS = re.compile(r"^decisions_(?:iterations|days) = .*\n", re.MULTILINE)
_ROWS = sa.table(
    "metric_rows",
    sa.column("job", sa.Integer),
    sa.column("kind", sa.Text),
    sa.column("iteration", sa.Integer),
    sa.column("row", sa.JSON),
)


def upgrade() -> None:
    if sa.inspect(op.get_bind()).has_table("jobs"):
        _convert()
    else:
        op.create_table("jobs", *job_columns_of_1(), *_job_columns(), sqlite_autoincrement=True)
        op.create_table("synced_files", *file_columns_of_1(), *_mark_columns())
        op.create_table("rollouts", *rollout_columns_of_1(), _place_column())


def downgrade() -> None:
    """Drop all tables, because the tables of version 1 cannot be filled from those of version 2."""
    for table in ("rollouts", "synced_files", "jobs"):
        op.drop_table(table)


def refer(column: str, table: str) -> sa.Column[int]:
    return sa.Column(column, sa.Integer, sa.ForeignKey(f"{table}.number", ondelete="CASCADE"), nullable=False)


def needed(kind: Any, *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=False) for name in names]


def optional(kind: Any, *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind) for name in names]


# Columns that version 1 already has.
def job_columns_of_1() -> tuple[SchemaItem, ...]:
    return (
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("state", sa.Text, nullable=False, index=True),
        sa.Column("run_dir", sa.Text, unique=True),
        *needed(sa.Text, "name", "wanted", "config", "origin", "home"),
        *optional(sa.Text, "run_id", "idempotency_key", "body_hash", "code", "detail"),
        *needed(sa.JSON, "tags"),
        *needed(sa.Integer, "attempt", "version"),
        *needed(UtcDateTime, "created"),
        *optional(UtcDateTime, "started", "ended"),
        sa.UniqueConstraint("home", "idempotency_key", name="uq_jobs_home_idempotency_key"),
    )


def file_columns_of_1() -> tuple[SchemaItem, ...]:
    return (
        sa.Column("number", sa.Integer, primary_key=True),
        refer("job", "jobs"),
        *needed(sa.Text, "name"),
        *needed(sa.BigInteger, "size", "modified_ns"),
        *optional(sa.Text, "digest"),
        sa.Index(None, "job", "name", unique=True),
    )


def rollout_columns_of_1() -> tuple[SchemaItem, ...]:
    return (
        sa.Column("number", sa.Integer, primary_key=True),
        refer("job", "jobs"),
        refer("file", "synced_files"),
        *needed(sa.Text, "rollout_id", "stage", "group_id", "policy", "status"),
        *needed(sa.Integer, "iteration", "sibling", "attempt", "decisions"),
        *optional(sa.BigInteger, "seed"),
        *optional(sa.Double, "outcome_reward", "reward"),
        *optional(sa.Integer, "unique_achievements", "env_steps"),
        *optional(sa.Text, "stop_reason", "failure_code"),
        sa.Index(None, "file", "rollout_id", unique=True),
        sa.Index(None, "job", "rollout_id"),
        sa.Index(None, "job", "stage", "iteration"),
        sa.Index(None, "job", "group_id"),
        *(sa.Index(f"ix_rollouts_job_{name}", "job", name) for name in _SORTS),
        sa.Index("ix_rollouts_facets", *_FACETS),
    )


def _convert() -> None:
    for column in _job_columns():
        op.add_column("jobs", column)
    for column in _mark_columns():
        op.add_column("synced_files", column)
    op.drop_column("synced_files", "decisions")
    op.add_column("rollouts", _place_column())
    _fill_jobs()
    op.execute(
        "UPDATE jobs SET finished = (SELECT MAX(finished) FROM iterations WHERE job = jobs.number), "
        "iteration = COALESCE((SELECT MAX(iteration) FROM iterations WHERE job = jobs.number), 0)"
    )
    # Version 1 stored the rollouts of a file in the order of the file.
    op.execute(
        "UPDATE rollouts SET place = ordered.place FROM (SELECT number, ROW_NUMBER() OVER "
        "(PARTITION BY file ORDER BY number) - 1 AS place FROM rollouts) AS ordered "
        "WHERE ordered.number = rollouts.number"
    )
    op.execute("DELETE FROM synced_files WHERE name = 'ledger.jsonl'")
    # The next sync reads the metrics again, and numbers their rows above those that live pages have seen.
    op.execute(
        "UPDATE synced_files SET size = 0, modified_ns = -1, digest = NULL, base = "
        "COALESCE((SELECT MAX(number) FROM metric_rows WHERE job = synced_files.job), 0) "
        "WHERE name = 'metrics.jsonl'"
    )
    for table in _DROPPED:
        op.drop_table(table)


def _fill_jobs() -> None:
    """Fill the new columns from the old tables, since no sync can fill them once a run directory is gone."""
    connection = op.get_bind()
    for number, config in connection.execute(sa.select(_JOBS.c.number, _JOBS.c.config)).all():
        values = _names(config) | {
            "config": _DECISIONS.sub("", config),
            "outcome": _last(connection, number, "iteration", "episode/outcome_reward"),
            "evaluation": _last(connection, number, "evaluation", "eval/outcome_reward"),
        }
        connection.execute(sa.update(_JOBS).where(_JOBS.c.number == number).values(values))


def _names(config: str) -> dict[str, Any]:
    try:
        tables = tomli.loads(config)
        rollout, model = tables.get("rollout", {}), tables.get("model", {})
        named = model.get("preset") or model.get("path") or model.get("name") or ""
        return {
            "environment": str(rollout.get("env_name", "")),
            "model": str(named).rstrip("/").rpartition("/")[2],
        }
    except (tomli.TOMLDecodeError, AttributeError):
        return {}


def _last(connection: sa.Connection, job: int, kind: str, name: str) -> float | None:
    """Return the number `name` of the last row of a kind, or None."""
    query = sa.select(_ROWS.c.row).where(_ROWS.c.job == job, _ROWS.c.kind == kind)
    row = connection.scalar(query.order_by(_ROWS.c.iteration.desc()).limit(1)) or {}
    value = row.get(name)
    return value if isinstance(value, int | float) and math.isfinite(value) else None
