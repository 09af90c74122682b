"""Pure: what a job's row says of it, as several pages show it."""

from datetime import timedelta

from trainer_backend.dashboard.figures import duration
from trainer_backend.store.rows import ENDED, JobRow


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
