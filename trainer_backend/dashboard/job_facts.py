"""Pure: what a job's row says of it, as several pages show it."""

import tomllib
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from trainer_backend.dashboard.figures import duration
from trainer_backend.store.rows import ENDED, JobRow


def settings_of(job: JobRow) -> Mapping[str, Any]:
    """The job's tables; nothing where its text cannot be read any more."""
    try:
        return tomllib.loads(job.config)
    except tomllib.TOMLDecodeError:
        return {}


def iterations_of(job: JobRow) -> int:
    """How many it is to do; 0 where that is not known."""
    found = settings_of(job).get("training", {}).get("iterations", 0)
    return found if isinstance(found, int) else 0


def took(job: JobRow) -> str:
    """From its start to its end; nothing before it has ended."""
    if job.started is None or job.ended is None or job.state not in ENDED:
        return ""
    return duration(max(job.ended - job.started, timedelta()).total_seconds())


def folder_of(job: JobRow) -> str:
    """The name of its run directory; of a job that has none yet its id."""
    return (job.run_dir or job.id).rstrip("/").rpartition("/")[2]


def end_of(path: str) -> str:
    """Of a path its last three parts: what stands before them is the same for many."""
    parts = path.split("/")
    return path if len(parts) <= 4 else "…/" + "/".join(parts[-3:])


def clipped(text: str, most: int) -> str:
    """At most so many characters; that something is left out is shown."""
    return text if len(text) <= most else text[: most - 1] + "…"
