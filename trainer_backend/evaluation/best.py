"""Compares evaluations on the worlds that they share, and finds the best one."""

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
# Key of the digest of an evaluation's requests (`digest_tasks`) in the row of its metrics.
TASKS_DIGEST = "eval/tasks_digest"
# Outcome by the id of a data set's row; without a data set, by the seed of a world.
Outcomes = Mapping[str | int, float]


def read_outcomes(path: Path) -> Outcomes:
    """Read the outcomes of an evaluation's finished episodes; empty if the file does not exist."""
    if not path.exists():
        return {}
    return {
        read_row_id(row["group_id"]) or row["seed"]: row["outcome_reward"]
        for row in finished_rows(path, ["group_id", "seed", "outcome_reward"])
    }


def paired_difference(
    first: Path, other: Path, *, without: Collection[str | int] = frozenset()
) -> Interval | None:
    """Return the mean of outcome differences (other - first), with its 95 % interval, over shared worlds.

    `first` and `other` are rollout files. Return None if they share no world. Worlds in `without`, such as
    ids whose row changed, are ignored.
    """
    before, after = read_outcomes(first), read_outcomes(other)
    shared = [world for world in before if world in after and world not in without]
    if not shared:
        return None
    differences = [after[world] - before[world] for world in shared]
    successes = {*before.values(), *after.values()} <= {0.0, 1.0}
    return paired_success_interval(differences) if successes else mean_interval(differences)


def find_comparable(evaluations: Sequence[Row]) -> list[Row]:
    """Return the last evaluation, and those before it that played the same tasks.

    Tasks differ if rows of the data set or settings of the environment were changed between evaluations. An
    evaluation from before 2026-11-28 has no digest of its tasks; it counts as having the digest of the next
    evaluation that has one.
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
    """The metrics of the best evaluation; None without evaluations, or if each lost too many worlds."""
    notes: Mapping[int, str]
    """Sentences for the user, by iteration: how an evaluation with lost worlds was compared, or why
    evaluations were skipped."""


def find_best(evaluations: Sequence[Row], outcomes: Callable[[int], Outcomes], *, most: float) -> Best:
    """Find the evaluation with the highest mean outcome; among equal ones, the earliest.

    Two evaluations are compared by the worlds that both finished. If more than the share `most` of the worlds
    is missing from this comparison, the later evaluation is skipped. Evaluations with other tasks than the
    last one are skipped too.

    Args:
        evaluations: the evaluations' rows of metrics, the oldest first.
        outcomes: returns the outcomes of the evaluation after a given iteration.
        most: the largest share of missing worlds (`training.max_lost_share`).
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
    """Return a clause that says which evaluations had other tasks than the last one; empty if none had."""
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
