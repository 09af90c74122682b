"""A learner of several ranks: the numbers of one process, and what happens to one that fails."""

import asyncio
from pathlib import Path

from tests.conftest import ListReporter, tiny_job
from tests.trainer_backend.run.test_learner_process import calls_in_order, played
from trainer_backend.learner.factory import LocalFactory
from trainer_backend.run.learner_process import LearnerProcess

__all__ = ["played"]
JOB = tiny_job(
    cluster__launcher="local",
    learner__nproc_per_node=2,
    learner__timeout_s=60,
    algorithm__advantage="gae",
    training__kl_reward_coef=0.1,
    training__mismatch_limit=1e9,
    warmup__epochs=1,
)


async def test_two_ranks_are_one_learner(played, tmp_path: Path):
    alone = JOB.model_copy(update={"learner": JOB.learner.model_copy(update={"nproc_per_node": 1})})
    expected = calls_in_order(LocalFactory(alone), played, tmp_path / "one")
    async with LearnerProcess(JOB, tmp_path / "learner.log", ListReporter()) as process:
        results = await asyncio.to_thread(calls_in_order, process, played, tmp_path / "two")
    for one, two in zip(expected, results, strict=True):
        print(one, two)
