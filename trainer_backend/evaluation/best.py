"""Compares evaluations world by world, and finds the best one."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from trainer_backend.collect.losses import losses_in
from trainer_backend.collect.sources import read_row_id
from trainer_backend.core.intervals import paired_success_interval
from trainer_backend.core.statistics import Interval, mean_interval
from trainer_backend.rundir.rollout_files import finished_rows

Row = Mapping[str, Any]
# Key of an evaluation's row: the digest of its requests (`digest_tasks`).
TASKS_DIGEST = "eval/tasks_digest"
# Outcomes by row id of the data set, or without a data set by seed of the world.
Outcomes = Mapping[str | int, float]


def read_outcomes(path: Path) -> Outcomes:
    """Read the outcomes of an evaluation's finished episodes; empty if the file is gone."""
    if not path.exists():
        return {}
    return {
        read_row_id(row["group_id"]) or row["seed"]: row["outcome_reward"]
        for row in finished_rows(path, ["group_id", "seed", "outcome_reward"])
    }


def paired_difference(
    first: Path, other: Path, *, without: Collection[str | int] = frozenset()
) -> Interval | None:
    """Return the mean of (other - first) over the worlds that both played; None if there are none.

    `without` are worlds to ignore, such as rows with the same id and different content.
    """
    before, after = read_outcomes(first), read_outcomes(other)
    shared = [world for world in before if world in after and world not in without]
    if not shared:
        return None
    differences = [after[world] - before[world] for world in shared]
    successes = {*before.values(), *after.values()} <= {0.0, 1.0}
    return paired_success_interval(differences) if successes else mean_interval(differences)


def find_comparable(evaluations: Sequence[Row]) -> list[Row]:
    """Return the evaluations with the same tasks as the last one, and the last one.

    Rows of a data set or settings of the environment may change between evaluations. An evaluation from
    before 2026-11-28 has no digest of its tasks, and takes the digest of the next evaluation that has one.
    """
    found, digest = [], None
    wanted = evaluations[-1].get(TASKS_DIGEST) if evaluations else None
    for row in reversed(evaluations):
        digest = row.get(TASKS_DIGEST, digest)
        if digest == wanted:
            found.append(row)
    return found[::-1]


class Best(NamedTuple):
    row: Row | None
    """The row of the best evaluation; None if no evaluation can be compared."""
    notes: Mapping[int, str]
    """By iteration: how an evaluation with lost worlds or other tasks was compared, or why not."""


def find_best(evaluations: Sequence[Row], outcomes: Callable[[int], Outcomes], *, most: float) -> Best:
    """Find the evaluation with the highest mean outcome, the first of equals.

    Two evaluations are compared by the worlds that both finished. The later one is skipped if this leaves out
    more than the share `most` of the worlds. Evaluations with other tasks than the last one are skipped too.

    Args:
        evaluations: rows, the oldest first.
        outcomes: reads the outcomes of the evaluation after an iteration.
        most: `training.max_lost_share`.
    """
    best: Row | None = None
    notes: dict[int, str] = {}
    if others := describe_others(evaluations):
        notes[evaluations[-1]["iteration"]] = f"{others}, so none of them can be the best checkpoint"
    for row in find_comparable(evaluations):
        losses, name = losses_in(row), f"evaluation after iteration {row['iteration']}"
        if best is None:
            if losses.share > most:
                _add(notes, row, _refusal(name, losses.total - losses.lost, losses.total, most))
            else:
                best = row
            continue
        if not losses.lost and not losses_in(best).lost:
            best = max(best, row, key=lambda item: item["eval/outcome_reward"])
            continue
        before, after = outcomes(best["iteration"]), outcomes(row["iteration"])
        shared = [world for world in before if world in after]
        total = max(losses.total, losses_in(best).total)
        if not shared or total - len(shared) > most * total:
            _add(notes, row, _refusal(name, len(shared), total, most))
            continue
        both = f"the {len(shared)} of {total} worlds that both finished"
        _add(notes, row, f"{name} is compared with the best one by {both}")
        if fmean(after[world] for world in shared) > fmean(before[world] for world in shared):
            best = row
    return Best(best, notes)


def _add(notes: dict[int, str], row: Row, note: str) -> None:
    before = notes.get(row["iteration"])
    notes[row["iteration"]] = note if before is None else f"{before}; {note}"


def describe_others(evaluations: Sequence[Row]) -> str:
    """Say which evaluations cannot be compared with the last one; empty if all can."""
    comparable = find_comparable(evaluations)
    if len(comparable) == len(evaluations):
        return ""
    left_out = {row["iteration"] for row in comparable}
    *others, last = (str(row["iteration"]) for row in evaluations if row["iteration"] not in left_out)
    which = f"iterations {', '.join(others)} and {last}" if others else f"iteration {last}"
    return f"the evaluations after {which} set other tasks than the last one"


def _refusal(name: str, shared: int, total: int, most: float) -> str:
    return (
        f"{name} cannot become the best checkpoint: only {shared} of {total} worlds could be compared, and "
        f"training.max_lost_share is {most:g}"
    )
