"""The stored rollouts of a run through every estimator, without new rollouts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import StepMetadata
from trainer_backend.core.branching import by_parent
from trainer_backend.core.errors import AdvantageError, RewardError
from trainer_backend.core.statistics import step_deltas
from trainer_backend.credit import NOTHING, CreditAssignment, Measured
from trainer_backend.errors import RunDirectoryError
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.rollout_files import (
    Credit,
    finished_rows,
    read_rollouts,
    read_scored,
    read_values,
    read_values_after,
)


@dataclass(frozen=True, slots=True)
class Recredited:
    """What estimators made of the same decisions.

    Attributes:
        rollouts: those that finished, iteration after iteration.
        credits: by estimator, in the order of the rollouts.
        refused: estimators that could not be computed, with the reason.
    """

    rollouts: list[Rollout]
    credits: Mapping[str, list[Credit]]
    refused: Mapping[str, str]

    def advantages(self, name: str) -> list[float]:
        """[decisions] of all rollouts."""
        return list(chain.from_iterable(credit.advantages_T for credit in self.credits[name]))


def stored_files(run: RunDirectory, wanted: Sequence[int]) -> list[Path]:
    """The rollout files of the iterations wanted, or of all, in order.

    Raises:
        RunDirectoryError: there is no such file.
    """
    files = {int(path.stem.removeprefix("iteration_")): path for path in run.iteration_files()}
    missing = [str(number) for number in wanted if number not in files]
    if missing or not files:
        stored = ", ".join(map(str, sorted(files))) or "none"
        asked = f"iteration {', '.join(missing)}" if missing else "any iteration"
        raise RunDirectoryError(f"{run.path}: no rollouts of {asked}; stored: {stored}")
    return [files[number] for number in sorted(set(wanted) or files)]


def stored_iterations(run: RunDirectory, wanted: Sequence[int]) -> list[list[Rollout]]:
    """The finished rollouts of each stored iteration, or of those wanted, in order.

    Raises:
        RunDirectoryError: no such file, or nothing in them was finished.
    """
    read = [read_rollouts(path) for path in stored_files(run, wanted)]
    finished = [[item for item in rollouts if item.trajectory is not None] for rollouts in read]
    if not any(finished):
        raise RunDirectoryError(f"{run.path}: none of the stored rollouts was finished")
    return [rollouts for rollouts in finished if rollouts]


def stored_measured(run: RunDirectory, wanted: Sequence[int]) -> list[Measured]:
    """What was measured in each of `stored_iterations`: by a critic, by branches, by a reference.

    Raises:
        RunDirectoryError: as `stored_files`.
    """
    files = stored_files(run, wanted)
    return [_measured(path) for path in files if finished_rows(path, ["rollout_id"])]


def _measured(path: Path) -> Measured:
    """Of one iteration. A file of branches may be empty: no episode reached a decision that was chosen."""
    beside = path.with_name(path.name.replace("iteration_", "branches_"))
    if not beside.exists():
        return Measured(read_values(path), read_values_after(path), None, read_scored(path))
    branches = by_parent(with_records(item) for item in read_rollouts(beside))
    scored = {**read_scored(path), **read_scored(beside)}
    return Measured(read_values(path), read_values_after(path), branches, scored)


def recredited(
    credit: CreditAssignment,
    iterations: Sequence[Sequence[Rollout]],
    names: Sequence[str],
    measured: Sequence[Measured] = (),
) -> Recredited:
    """Every iteration through every estimator, with the rewards and the keys of [algorithm] that the job has.

    Groups are those of their iteration. An estimator whose inputs were not stored is refused by name.
    `measured` is that of `stored_measured`; empty: nothing was.

    Raises:
        RewardError: r_t cannot be built from what is stored.
    """
    beside = measured or [NOTHING] * len(iterations)
    iterations = [[with_records(rollout) for rollout in rollouts] for rollouts in iterations]
    for rollouts, of_them in zip(iterations, beside, strict=True):
        for rollout in rollouts:
            credit.rewards.earned_by(rollout, of_them.scored)  # what fails here fails for every estimator
    credits: dict[str, list[Credit]] = {}
    refused: dict[str, str] = {}
    for name in names:
        with_it = replace(credit, algorithm=credit.algorithm.model_copy(update={"advantage": name}))
        try:
            credits[name] = [
                item
                for rollouts, of_them in zip(iterations, beside, strict=True)
                for item in with_it.credits(rollouts, of_them)
            ]
        except (AdvantageError, RewardError) as error:  # the rewards of its branches
            refused[name] = str(error)
    return Recredited(list(chain.from_iterable(iterations)), credits, refused)


def with_records(rollout: Rollout) -> Rollout:
    """The rollout with `decision_rewards` made from its counters where it was played without them.

    So a run whose rewards were off can be credited by decisions. An environment without achievements has no
    counters, and its rollouts stay as they are.
    """
    episode = rollout.trajectory
    if episode is None or not episode.achievements_counts:
        return rollout
    steps = tuple(
        step
        if step.metadata.decision_rewards is not None or step.next_observation is None
        else step.model_copy(update={"metadata": StepMetadata(decision_rewards=step_deltas(step))})
        for step in episode.steps
    )
    return rollout.model_copy(update={"trajectory": episode.model_copy(update={"steps": steps})})
