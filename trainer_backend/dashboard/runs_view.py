"""Pure: lines of the list of runs."""

from dataclasses import dataclass
from datetime import datetime

from trainer_backend.dashboard.figures import number
from trainer_backend.dashboard.job_facts import clipped, folder_of, took
from trainer_backend.dashboard.key_view import bounds_of
from trainer_backend.dashboard.sparks import Spark, spark_of
from trainer_backend.store.job_text import iterations_of, tables_of
from trainer_backend.store.rows import ACTIVE, RunSummary, Series

# Numbers of the last rows that the list shows.
LATEST = (
    "episode/outcome_reward",
    "eval/outcome_reward",
    "eval/outcome_reward_low",
    "eval/outcome_reward_high",
)
SPARK = "episode/outcome_reward"
_TEXT = 140  # of a detail in the list: the run's own page has all of it


@dataclass(frozen=True, slots=True)
class RunLine:
    """A line of the list of runs."""

    id: str
    name: str
    where: str
    tags: tuple[str, ...]
    state: str
    live: bool
    detail: str
    done: int
    total: int
    outcome: str
    spark: Spark
    held_out: str
    bounds: str
    advantage: str
    begun: datetime
    took: str


def run_line(summary: RunSummary, spark: Series | None) -> RunLine:
    job, held_out = summary.job, summary.evaluated
    tables = tables_of(job.config)
    return RunLine(
        id=job.id,
        name=job.name,
        where=f"{folder_of(job)}{'' if job.origin == 'api' else ' · turnwise train'}",
        tags=tuple(f"{name}={value}" for name, value in job.tags.items()),
        state=job.state,
        live=job.state in ACTIVE,
        detail=clipped(job.detail or "", _TEXT),
        done=summary.iteration,
        total=iterations_of(job.config) or 0,
        outcome=number(summary.latest.get(SPARK)),
        spark=spark_of(spark, "training outcome"),
        held_out=number(held_out.get("eval/outcome_reward")),
        bounds=bounds_of(held_out),
        advantage=str(tables.get("algorithm", {}).get("advantage", "")),
        begun=job.started or job.created,
        took=took(job),
    )
