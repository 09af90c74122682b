"""The stored rollouts of a run through every estimator, without new rollouts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import StepMetadata
from trainer_backend.core.critic import OfEpisode
from trainer_backend.core.errors import AdvantageError
from trainer_backend.core.statistics import step_deltas
from trainer_backend.credit import credits_of
from trainer_backend.errors import RunDirectoryError
from trainer_backend.jobfile.schema import JobConfig
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.rollout_files import Credit, read_rollouts, read_values


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


def stored_values(run: RunDirectory, wanted: Sequence[int]) -> dict[str, OfEpisode]:
    """What a critic said in those iterations of the run, by rollout id; empty where there was none.

    Raises:
        RunDirectoryError: as `stored_files`.
    """
    return {name: found for path in stored_files(run, wanted) for name, found in read_values(path).items()}


def recredited(
    job: JobConfig,
    iterations: Sequence[Sequence[Rollout]],
    names: Sequence[str],
    values: Mapping[str, OfEpisode] | None = None,
) -> Recredited:
    """Every iteration through every estimator, with the rewards and the keys of [algorithm] that the job has.

    Groups are those of their iteration. An estimator whose inputs were not stored is refused by name.
    `values` are those of `stored_values`.

    Raises:
        RewardError: r_t cannot be built from what is stored.
    """
    iterations = [[with_records(rollout) for rollout in rollouts] for rollouts in iterations]
    credits: dict[str, list[Credit]] = {}
    refused: dict[str, str] = {}
    for name in names:
        algorithm = job.algorithm.model_copy(update={"advantage": name})
        with_it = job.model_copy(update={"algorithm": algorithm})
        try:
            credits[name] = [
                item for rollouts in iterations for item in credits_of(with_it, rollouts, values)
            ]
        except AdvantageError as error:
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
