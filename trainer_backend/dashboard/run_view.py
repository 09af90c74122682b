"""Pure: what stands above every page of a run: its state, how far it is, what may be asked of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from trainer_backend.dashboard.figures import ago, roughly
from trainer_backend.dashboard.job_facts import end_of, took
from trainer_backend.rundir.state import RunState
from trainer_backend.store.job_text import iterations_of, tables_of
from trainer_backend.store.rows import ACTIVE, JobRow, Series


@dataclass(frozen=True, slots=True)
class Head:
    """What stands above every page of a run.

    Attributes:
        live: it may change by itself; `place` is how far this page has come, for the stream of events.
        progress: what is under way, in words.
        actions: what may be asked of it now.
    """

    id: str
    name: str
    state: str
    live: bool
    place: str
    done: int
    total: int
    progress: str
    actions: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    code: str
    detail: str


def head_of(
    job: JobRow,
    state: RunState | None,
    *,
    iteration: int,
    rate_s: float | None,
    place: str,
    now: datetime,
    can_control: bool,
) -> Head:
    """
    Args:
        state: what the run directory says of itself; None where it says nothing.
        iteration: the last finished one.
        rate_s: seconds of one iteration, by the last ones; None where none is known.
    """
    total, live = iterations_of(job.config) or 0, job.state in ACTIVE or job.state == "queued"
    done = max(iteration, state.iteration if state is not None and live else 0)
    return Head(
        id=job.id, name=job.name, state=job.state, live=live, place=place, done=done, total=total,
        progress=_progress(job, state, done, total, rate_s),
        actions=_actions(job) if can_control else (),
        facts=tuple(_facts(job, state, now)),
        code=job.code or "", detail=job.detail or "",
    )  # fmt: skip


def seconds_an_iteration(times: Mapping[str, Series]) -> float | None:
    """Sum of the stages' times, mean of the last few iterations; None where nothing is known."""
    last = [series.values_N[-5:] for series in times.values() if series.values_N]
    return sum(sum(values) / len(values) for values in last) if last else None


def _progress(job: JobRow, state: RunState | None, done: int, total: int, rate_s: float | None) -> str:
    told = f"{done} of {total} iterations" if total else f"{done} iterations"
    if job.state not in ACTIVE:
        return told
    if state is not None and (doing := state.stage or {"starting": "starting"}.get(state.state, "")):
        told += f" · {doing}" + (
            f", {state.done} of {state.total}" if state.stage and state.total > 1 else ""
        )
    left = (total - done) * rate_s if rate_s and total > done else 0.0
    return told + (f" · about {roughly(left)} left" if left else "")


def _facts(job: JobRow, state: RunState | None, now: datetime) -> list[tuple[str, str]]:
    tables = tables_of(job.config)
    model, rollout = tables.get("model", {}), tables.get("rollout", {})
    found = [
        ("environment", rollout.get("env_name", "")),
        ("model", end_of(str(model.get("path") or model.get("preset") or model.get("name") or ""))),
        ("advantage", tables.get("algorithm", {}).get("advantage", "")),
        ("begun", ago(job.started, now) if job.started else ""),
        ("took", took(job)),
        ("starts", str(state.starts) if state is not None and state.starts > 1 else ""),
        ("directory", job.run_dir or ""),
    ]
    return [(name, str(value)) for name, value in found if value]


def _actions(job: JobRow) -> tuple[str, ...]:
    if job.origin == "cli":
        return ()
    if job.state in ("queued", "running"):
        return ("pause", "cancel")
    if job.state in ("paused", "failed", "cancelled"):
        return ("resume", "cancel") if job.state == "paused" else ("resume",)
    return ("cancel",) if job.state == "pausing" else ()
