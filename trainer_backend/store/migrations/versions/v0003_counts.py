"""Stores counts of rollouts for each file, so that no page needs to read all rollouts of a run."""

from itertools import groupby
from operator import itemgetter

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

_COUNTED = ("stage", "policy", "status", "failure_code", "stop_reason", "iteration")
_FILES = sa.table("synced_files", sa.column("number", sa.Integer), sa.column("counts", sa.JSON))
_ROLLOUTS = sa.table("rollouts", *map(sa.column, ("file", *_COUNTED)))


def upgrade() -> None:
    op.add_column("synced_files", sa.Column("counts", sa.JSON, nullable=False, server_default="[]"))
    by = [_ROLLOUTS.c[name] for name in ("file", *_COUNTED)]
    connection = op.get_bind()
    rows = connection.execute(sa.select(*by, sa.func.count()).group_by(*by).order_by("file")).all()
    for file, counts in groupby(rows, itemgetter(0)):
        values = [list(row[1:]) for row in counts]
        connection.execute(sa.update(_FILES).where(_FILES.c.number == file).values(counts=values))
    op.drop_index("ix_rollouts_facets", "rollouts")


def downgrade() -> None:
    op.create_index("ix_rollouts_facets", "rollouts", ["job", *_COUNTED])
    op.drop_column("synced_files", "counts")
