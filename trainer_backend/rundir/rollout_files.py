"""Rollouts as Parquet: a row an episode, readable by pandas, DuckDB and `datasets`.

The flat columns and `decisions` are for people and queries; `rollout` is the whole record as JSON, so
that a stored rollout replays through segments, rewards and advantages exactly (`read_rollouts`).
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import StepData
from trainer_backend.core.statistics import step_deltas, unique_achievements
from trainer_backend.rundir.boundary import writing

_DECISION = pa.struct(
    [
        ("turn", pa.int32()),
        ("action", pa.string()),
        ("unique", pa.list_(pa.string())),
        ("unique_delta", pa.int32()),
        ("ach_delta", pa.int32()),
        ("env_reward", pa.float64()),
        ("env_steps", pa.int32()),
        ("invalid_reason", pa.string()),
        ("reward", pa.float64()),
        ("advantage", pa.float64()),
    ]
)
_SCHEMA = pa.schema(
    [
        ("rollout_id", pa.string()),
        ("run_id", pa.string()),
        ("iteration", pa.int32()),
        ("group_id", pa.string()),
        ("sibling", pa.int32()),
        ("attempt", pa.int32()),
        ("instance_id", pa.string()),
        ("status", pa.string()),
        ("seed", pa.int64()),
        ("policy_name", pa.string()),
        ("model", pa.string()),
        ("outcome_reward", pa.float64()),
        ("unique_achievements", pa.int32()),
        ("decision_count", pa.int32()),
        ("env_steps", pa.int32()),
        ("stop_reason", pa.string()),
        ("terminated", pa.bool_()),
        ("truncated", pa.bool_()),
        ("failure_code", pa.string()),
        ("decisions", pa.list_(_DECISION)),
        ("rollout", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class Credit:
    """What training made of one episode: r_t and the advantage of each decision, both [T]."""

    rewards_T: Sequence[float]
    advantages_T: Sequence[float]


def write_rollouts(path: Path, rollouts: Sequence[Rollout], credits: Sequence[Credit] | None = None) -> None:
    """Write all rollouts of a stage, failed ones too; aside first, then renamed.

    Raises:
        RunDirectoryError: the disk is full, or refuses.
    """
    rows = [
        _row(rollout, credits[index] if credits is not None and index < len(credits) else None)
        for index, rollout in enumerate(rollouts)
    ]
    table = pa.Table.from_pylist(rows, schema=_SCHEMA)
    with writing(path, pa.ArrowException):
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".tmp")
        pq.write_table(table, aside, compression="zstd")
        os.replace(aside, path)


def read_rollouts(path: Path) -> list[Rollout]:
    """The rollouts of a file, exactly as they were collected."""
    column = pq.read_table(path, columns=["rollout"]).column("rollout")
    return [Rollout.model_validate_json(text) for text in column.to_pylist()]


def read_rollout(path: Path, rollout_id: str) -> Rollout:
    """One rollout of a file, which must hold it."""
    found = pq.read_table(path, columns=["rollout"], filters=[("rollout_id", "=", rollout_id)])
    return Rollout.model_validate_json(found.column("rollout")[0].as_py())


def finished_rows(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """These columns of the episodes that were finished, a dict an episode."""
    table = pq.read_table(path, columns=[*columns, "status"])
    return [row for row in table.to_pylist() if row["status"] == "finished"]


def _row(rollout: Rollout, credit: Credit | None) -> dict[str, Any]:
    trajectory = rollout.trajectory
    row = {name: getattr(rollout, name) for name in _SCHEMA.names[:8]}
    row |= {
        "failure_code": rollout.failure.code if rollout.failure else None,
        "rollout": rollout.model_dump_json(exclude_unset=True),
    }
    if trajectory is None:
        return row
    for name in ("seed", "policy_name", "model", "outcome_reward", "env_steps", "terminated", "truncated"):
        row[name] = getattr(trajectory, name)
    row |= {
        "unique_achievements": unique_achievements(trajectory),
        "decision_count": len(trajectory.steps),
        "stop_reason": str(trajectory.stop_reason),
        "decisions": [_decision(step, credit) for step in trajectory.steps],
    }
    return row


def _decision(step: StepData, credit: Credit | None) -> dict[str, Any]:
    delta = step_deltas(step)
    rewards = step.env_rewards or ()
    return {
        "turn": step.turn,
        "action": " ".join(step.step_info.executed_actions),
        "unique": list(delta.unique),
        "unique_delta": delta.unique_delta,
        "ach_delta": delta.ach_delta,
        "env_reward": float(sum(rewards)),
        "env_steps": len(rewards),
        "invalid_reason": step.step_info.invalid_reason,
        "reward": credit.rewards_T[step.turn - 1] if credit else None,
        "advantage": credit.advantages_T[step.turn - 1] if credit else None,
    }
