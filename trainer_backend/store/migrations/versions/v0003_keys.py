"""A request's key is one of its service; a rollout is learned from once, whatever start played it; pages of
long runs.

What updates consumed is filled again by the next sync. Down from here, of two services' requests with one key
the first one's stays; the other's job does, without it.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

_KEY = "uq_jobs_idempotency_key"
_KEY_OF_HOME = "uq_jobs_home_idempotency_key"
_INDEXES = {
    "ix_rollouts_job_number": ("job", "number"),
    "ix_rollouts_job_reward": ("job", "reward"),
    "ix_rollouts_job_unique_achievements": ("job", "unique_achievements"),
    "ix_rollouts_job_decisions": ("job", "decisions"),
    "ix_rollouts_facets": ("job", "stage", "policy", "status", "failure_code", "stop_reason", "iteration"),
}


def upgrade() -> None:
    _change_jobs(drop=_KEY, columns=("home", "idempotency_key"), name=_KEY_OF_HOME)
    _make_consumed(
        sa.Column("planned", sa.Text, primary_key=True), sa.Column("rollout_id", sa.Text, nullable=False)
    )
    for name, columns in _INDEXES.items():
        op.create_index(name, "rollouts", columns)


def downgrade() -> None:
    for name in _INDEXES:
        op.drop_index(name, "rollouts")
    _make_consumed(sa.Column("rollout_id", sa.Text, primary_key=True))
    jobs = sa.table("jobs", sa.column("number"), sa.column("idempotency_key"), sa.column("body_hash"))
    first = jobs.alias()
    earlier = sa.select(1).where(
        first.c.idempotency_key == jobs.c.idempotency_key, first.c.number < jobs.c.number
    )
    op.execute(jobs.update().where(earlier.exists()).values(idempotency_key=None, body_hash=None))
    _change_jobs(drop=_KEY_OF_HOME, columns=("idempotency_key",), name=_KEY)


def _change_jobs(*, drop: str, columns: tuple[str, ...], name: str) -> None:
    """SQLite changes no constraint: there the table is copied, and no number of a job may come back."""
    last, connection = None, op.get_bind()
    if connection.dialect.name == "sqlite":
        last = connection.scalar(sa.text("SELECT seq FROM sqlite_sequence WHERE name = 'jobs'"))
    with op.batch_alter_table("jobs", table_kwargs={"sqlite_autoincrement": True}) as table:
        table.drop_constraint(drop, type_="unique")
        table.create_unique_constraint(name, columns)
    if last is not None:
        op.execute("DELETE FROM sqlite_sequence WHERE name = 'jobs'")
        op.execute(f"INSERT INTO sqlite_sequence (name, seq) VALUES ('jobs', {int(last)})")


def _make_consumed(*columns: sa.Column[str]) -> None:
    """Anew and empty; the ledgers count as not read."""
    op.drop_table("consumed")
    op.create_table(
        "consumed",
        sa.Column(
            "job",
            sa.Integer,
            sa.ForeignKey("jobs.number", ondelete="CASCADE"),
            primary_key=True,
            nullable=False,
        ),
        *columns,
        sa.Column("iteration", sa.Integer, nullable=False),
        sa.Index(None, "job", "iteration"),
    )
    op.execute("DELETE FROM synced_files WHERE name = 'ledger.jsonl'")
