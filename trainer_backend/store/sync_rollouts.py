"""Parquet files of rollouts: a sync copies each new or changed file whole, and drops rows of deleted ones."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from trainer_backend.core.policies import player_of
from trainer_backend.errors import RunDirectoryError
from trainer_backend.rundir.rollout_index import RolloutFile, read_index, rollout_files
from trainer_backend.store.database import Store
from trainer_backend.store.retention import keeps_decisions, newest_iteration, remove_old_files, retention_of
from trainer_backend.store.sync_lines import FileMark
from trainer_backend.store.tables import Decision, Rollout, SyncedFile, job_number

# The columns that both have under one name.
_SAME = (
    *("rollout_id", "group_id", "sibling", "attempt", "status", "seed", "outcome_reward"),
    *("unique_achievements", "env_steps", "stop_reason", "failure_code"),
)


def sync_rollouts(
    store: Store, job_id: str, run: Path, marks: Mapping[str, FileMark], *, tidies: bool = True
) -> bool:
    """Copy a run's rollout files into the store, and remove rows whose files are deleted or expired.

    `tidies`: files that [retention] does not keep are deleted first.
    """
    retention = retention_of(run)
    files = rollout_files(run)
    if tidies:
        files = remove_old_files(retention, files)
    newest, now_ns = newest_iteration(files), int(store.clock().timestamp() * 1e9)
    changed, problems = False, []
    for file in files:
        decisions = keeps_decisions(retention, file, newest=newest, now_ns=now_ns)
        try:
            changed = _sync_file(store, job_id, file, marks.get(file.name), decisions=decisions) or changed
        except FileNotFoundError:
            continue  # deleted just now: the next sync sees that
        except RunDirectoryError as error:
            problems.append(error)
    names = {file.name for file in files}
    stale = [name for name in marks if name.startswith("rollouts/") and name not in names]
    if stale:
        _remove(store, job_id, stale)
    if problems:
        raise problems[0]
    return changed or bool(stale)


def _sync_file(
    store: Store, job_id: str, file: RolloutFile, mark: FileMark | None, *, decisions: bool
) -> bool:
    """Copy one file; return whether anything changed."""
    same = mark is not None and (mark.size, mark.modified_ns) == (file.size, file.modified_ns)
    if same and mark is not None and mark.decisions == decisions:
        return False
    if same and mark is not None and not decisions:
        of_file = select(Rollout.number).where(Rollout.file == mark.number)
        with store.write() as connection:
            connection.execute(delete(Decision).where(Decision.rollout.in_(of_file)))
            connection.execute(
                update(SyncedFile).where(SyncedFile.number == mark.number).values(decisions=False)
            )
        return True
    rows = read_index(file.path)  # before the transaction, which must not wait for the disk
    with store.write() as connection:
        job = job_number(connection, job_id, lock=True)
        connection.execute(delete(SyncedFile).where(SyncedFile.job == job, SyncedFile.name == file.name))
        _put(connection, job, file, rows, decisions=decisions)
    return True


def _put(
    connection: Connection, job: int, file: RolloutFile, rows: Sequence[Mapping[str, Any]], *, decisions: bool
) -> None:
    number = connection.scalar(
        insert(SyncedFile).returning(SyncedFile.number),
        {"job": job, "name": file.name, "size": file.size, "modified_ns": file.modified_ns}
        | {"digest": None, "decisions": decisions},
    )
    if not rows:
        return
    whose = {"job": job, "file": number, "stage": file.stage, "iteration": file.iteration}
    numbers = connection.scalars(
        insert(Rollout).returning(Rollout.number, sort_by_parameter_order=True),
        [{**whose, **_rollout(row)} for row in rows],
    ).all()
    values = [
        {"rollout": rollout, **decision}
        for rollout, row in zip(numbers, rows, strict=True)
        for decision in row["decisions"]
    ]
    if decisions and values:
        connection.execute(insert(Decision), values)


def _rollout(row: Mapping[str, Any]) -> dict[str, Any]:
    rewards = [decision["reward"] for decision in row["decisions"]]
    credited = bool(rewards) and all(reward is not None for reward in rewards)
    return {
        **{name: row[name] for name in _SAME},
        "policy": player_of(row["model"], row["policy_name"] or ""),
        "reward": sum(rewards) if credited else None,
        "decisions": row["decision_count"] or 0,
    }


def _remove(store: Store, job_id: str, names: Sequence[str]) -> None:
    with store.write() as connection:
        job = job_number(connection, job_id, lock=True)
        for name in names:
            connection.execute(delete(SyncedFile).where(SyncedFile.job == job, SyncedFile.name == name))
