"""A run is its files: metrics, decisions, checkpoints and the ledger leave the database; jobs get columns."""

import math
import re
from typing import Any

import sqlalchemy as sa
import tomli
from alembic import op

from trainer_backend.store.migrations.versions import v0001_tables as before
from trainer_backend.store.tables import UtcDateTime

revision = "0002"
down_revision = "0001"

# What they hold stands in the files of the runs, too.
_DROPPED = ("consumed", "checkpoints", "iterations", "decisions", "metrics", "curves", "metric_rows")


def _columns() -> tuple[sa.Column[Any], ...]:
    return (
        sa.Column("environment", sa.Text, nullable=False, server_default=""),
        sa.Column("model", sa.Text, nullable=False, server_default=""),
        sa.Column("iteration", sa.Integer, nullable=False, server_default="0"),
        sa.Column("finished", UtcDateTime),
        sa.Column("numbers", sa.JSON, nullable=False, server_default="{}"),
        sa.Column("outcome", sa.Double),
        sa.Column("evaluation", sa.Double),
    )


_JOBS = sa.table("jobs", sa.column("number", sa.Integer), sa.column("config", sa.Text), *_columns())
# Keys of [retention] that went with their table. A job that waits to begin must not fail on them.
_DECISIONS = re.compile(r"^decisions_(?:iterations|days) = .*\n", re.MULTILINE)
_ROWS = sa.table(
    "metric_rows",
    sa.column("job", sa.Integer),
    sa.column("kind", sa.Text),
    sa.column("iteration", sa.Integer),
    sa.column("row", sa.JSON),
)


def upgrade() -> None:
    for column in _columns():
        op.add_column("jobs", column)
    op.add_column("synced_files", sa.Column("base", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("synced_files", sa.Column("rows", sa.Integer, nullable=False, server_default="0"))
    op.drop_column("synced_files", "decisions")
    op.add_column("rollouts", sa.Column("place", sa.Integer, nullable=False, server_default="0"))
    _fill_jobs()
    op.execute(
        "UPDATE jobs SET finished = (SELECT MAX(finished) FROM iterations WHERE job = jobs.number), "
        "iteration = COALESCE((SELECT MAX(iteration) FROM iterations WHERE job = jobs.number), 0)"
    )
    # A file's rollouts were stored in its order.
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
    """Fill what a sync fills, also for jobs whose run directory is gone."""
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
    """Return a number of the last row of a kind."""
    query = sa.select(_ROWS.c.row).where(_ROWS.c.job == job, _ROWS.c.kind == kind)
    row = connection.scalar(query.order_by(_ROWS.c.iteration.desc()).limit(1)) or {}
    value = row.get(name)
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def downgrade() -> None:
    # The earlier version syncs every file again.
    op.execute("DELETE FROM rollouts")
    op.execute("DELETE FROM synced_files")
    before.create_metrics()
    before.create_decisions()
    before.create_training()
    op.drop_column("rollouts", "place")
    op.add_column(
        "synced_files", sa.Column("decisions", sa.Boolean, nullable=False, server_default=sa.false())
    )
    op.drop_column("synced_files", "rows")
    op.drop_column("synced_files", "base")
    for column in _columns():
        op.drop_column("jobs", column.name)
