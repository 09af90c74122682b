"""Rows of jobs, made by hand."""

from datetime import UTC, datetime
from typing import Any

from trainer_backend.store.rows import Job

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
CONFIG = '[model]\npreset = "tiny-0.3m"\n[training]\niterations = 7\n'
RUNNING = Job(
    number=1, id="0123456789abcdef0123456789abcdef", name="crafter", state="running", config=CONFIG,
    home="here", attempt=1, created=NOON, started=NOON, version=3,
)  # fmt: skip


def job(**changes: Any) -> Job:
    return replace(RUNNING, **changes)


def replace(job: Job, **changes: Any) -> Job:
    return job.model_copy(update=changes)
