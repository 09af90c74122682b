"""Cosines of estimators' gradients at a checkpoint of a run, by this process or by the ranks of a learner."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from trainer_backend.core.critic import OfEpisode
from trainer_backend.job.schema import JobConfig
from trainer_backend.launchers.choice import launcher_of
from trainer_backend.protocols import CreditedEpisode, Reporter
from trainer_backend.run.learner_process import LearnerProcess
from trainer_backend.rundir.layout import RunDirectory

Cosines = list[tuple[str, str, float]]


def cosines_at(
    checkpoint: Path,
    job: JobConfig,
    directory: RunDirectory,
    episodes: Sequence[CreditedEpisode],
    advantages: Mapping[str, Sequence[OfEpisode]],
    *,
    reporter: Reporter,
) -> dict[tuple[str, str], float]:
    """The cosine of each two estimators, by both orders of their names; see `learner.gradients`.

    A model that needs several ranks to be trained needs them here too.

    Args:
        advantages: by estimator, in the order of the episodes.
        reporter: hears of the ranks, and of the gradients done.
    """
    tell = partial(reporter.stage, "gradients")
    if job.learner.ranks > 1:
        by_ranks = _by_ranks(
            job,
            directory,
            reporter,
            lambda ranks: ranks.gradient_cosines(checkpoint, episodes, advantages, tell),
        )
        cosines = asyncio.run(by_ranks)
    else:
        # torch
        from trainer_backend.learner.factory import LocalFactory

        cosines = LocalFactory(job).gradient_cosines(checkpoint, episodes, advantages, tell)
    return {pair: cosine for a, b, cosine in cosines for pair in ((a, b), (b, a))}


async def _by_ranks(
    job: JobConfig, directory: RunDirectory, reporter: Reporter, ask: Callable[[LearnerProcess], Cosines]
) -> Cosines:
    # Not under the run's name: a learner that works for the run would take this for its next start.
    apart = replace(directory, run_id=f"{directory.run_id}.recredit")
    async with (
        launcher_of(job, apart.run_id, reporter.say) as launcher,
        LearnerProcess(job, apart, reporter, launcher) as process,
    ):
        return await asyncio.to_thread(ask, process)
