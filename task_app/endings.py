"""How a rollout that ended is told: a line of log (the runner binds its ids), and the `Rollout` as JSON."""

import structlog

from shared_schemas.json_text import encodable
from shared_schemas.rollouts import RolloutFailure, RolloutStatus
from shared_schemas.trajectory import Trajectory
from task_app.errors import EpisodeFailed, TaskAppError
from task_app.results import Record, rollout_json

log = structlog.get_logger("task_app")


def finished(record: Record, trajectory: Trajectory, instance_id: str) -> bytes:
    record.reason = trajectory.stop_reason.value
    record.decisions, record.env_steps = len(trajectory.steps), trajectory.env_steps
    log.info(
        "rollout_finished",
        stop_reason=trajectory.stop_reason.value,
        decisions=len(trajectory.steps),
        outcome=trajectory.outcome_reward,
    )
    return rollout_json(record, instance_id, "finished", trajectory=trajectory)


def failed(record: Record, exc: TaskAppError, instance_id: str) -> bytes:
    done = exc.decisions_done if isinstance(exc, EpisodeFailed) else 0
    log.warning("rollout_failed", code=exc.code, detail=exc.detail, decisions=done)
    failure = RolloutFailure(code=exc.code, detail=encodable(exc.detail), decisions_done=done)
    return _failure(record, "failed", failure, instance_id)


def broken(record: Record, instance_id: str) -> bytes:
    """A fault of this service, whose log says which."""
    failure = RolloutFailure(code="internal_error", detail="an error inside the task app; see its log")
    return _failure(record, "failed", failure, instance_id)


def cancelled(record: Record, detail: str, instance_id: str, *, decisions_done: int = 0) -> bytes:
    failure = RolloutFailure(code="cancelled", detail=detail, decisions_done=decisions_done)
    return _failure(record, "cancelled", failure, instance_id)


def _failure(record: Record, status: RolloutStatus, failure: RolloutFailure, instance_id: str) -> bytes:
    record.reason = failure.code
    return rollout_json(record, instance_id, status, failure=failure)
