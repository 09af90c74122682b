"""Rows of jobs, made by hand."""

from datetime import UTC, datetime
from typing import Any

from trainer_backend.store.rows import Job

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


def job(**changed: Any) -> Job:
    values: dict[str, Any] = {
        "number": 1,
        "id": "0123456789abcdef0123456789abcdef",
        "name": "crafter",
        "state": "running",
        "wanted": "run",
        "config": '[model]\npreset = "tiny-0.3m"\n[training]\niterations = 7\n',
        "run_dir": None,
        "run_id": None,
        "origin": "api",
        "home": "here",
        "tags": {},
        "attempt": 1,
        "created": NOON,
        "started": NOON,
        "ended": None,
        "code": None,
        "detail": None,
        "version": 3,
    }
    return Job(**(values | changed))


def replace(job: Job, **changed: Any) -> Job:
    return job.model_copy(update=changed)
