"""A training run, read top to bottom. The numbers are those of DESIGN.md section 3 and docs/route.md.

No torch here: the learner and the inference server are behind protocols.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shared_schemas.rollouts import Rollout, RolloutRequest
from trainer_backend.collect.collector import Collection, Collector
from trainer_backend.collect.plan import Planner
from trainer_backend.core.advantages.episodes import AdvantageConfig, EpisodeRewards
from trainer_backend.core.rewards import RewardConfig, reward_vector
from trainer_backend.core.segments import segments_of
from trainer_backend.core.statistics import decision_metrics, episode_metrics, unique_by_turn
from trainer_backend.evaluation import collection_metrics, evaluation_metrics, finished_trajectories
from trainer_backend.job_schema import JobConfig
from trainer_backend.plugins import estimator
from trainer_backend.protocols import CreditedEpisode, InferenceServer, Learner, Progress, Reporter
from trainer_backend.rundir.checkpoint_paths import mark_best, prune_checkpoints
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.rollout_files import Credit, write_rollouts
from trainer_backend.stopping import until


@dataclass(frozen=True, slots=True)
class Run:
    """What a run works with."""

    job: JobConfig
    directory: RunDirectory
    collector: Collector
    learner: Learner
    server: InferenceServer
    reporter: Reporter

    @property
    def planner(self) -> Planner:
        return Planner(self.job, self.directory.run_id, self.server.inference)


@dataclass(frozen=True, slots=True)
class Credited:
    """Stops 7, 9 and 10 for a batch of episodes: what the update needs, and what the logs say."""

    episodes: list[CreditedEpisode]
    credits: list[Credit]
    metrics: dict[str, float]


async def train(run: Run, progress: Progress, stop: asyncio.Event) -> Progress:
    """Iterate until the job is done or `stop` is set; the state of the last finished iteration.

    A stop is heeded between stages and while rollouts are collected, never in the middle of an update,
    so what is saved is always the end of an iteration.
    """
    await run.server.publish(progress.policy_version)
    while True:
        if _evaluation_due(run, progress):
            progress = await _evaluate_and_save(run, progress, stop)
        elif progress.iteration % run.job.training.checkpoint_every == 0:
            await _save(run, progress)
        if progress.iteration >= run.job.training.iterations or stop.is_set():
            break
        finished = await iterate(run, progress, stop)
        if finished is None:
            break
        progress = finished
    if not (run.directory.checkpoints / f"iteration_{progress.iteration}").exists():
        await _save(run, progress)
    return progress


def _evaluation_due(run: Run, progress: Progress) -> bool:
    """At both ends and every so often; also when a stop came before an evaluation that was due."""
    iteration = progress.iteration
    last = iteration == run.job.training.iterations
    if iteration % run.job.evaluation.every_n_iters and not last:
        return False
    rows = run.directory.metrics()
    return not any(row["kind"] == "evaluation" and row["iteration"] == iteration for row in rows)


async def iterate(run: Run, progress: Progress, stop: asyncio.Event) -> Progress | None:
    """One iteration (stops 2 to 13); None when it was stopped before the update."""
    iteration = progress.iteration + 1
    started = time.monotonic()
    requests = run.planner.training(iteration)  # 2, 3
    collection = await _collect(run, requests, f"collect {iteration}", stop)  # 4 to 6
    if collection is None:
        return None
    collected = time.monotonic()
    trajectories = finished_trajectories(collection.rollouts, "training")
    credited = credit(run.job, collection.rollouts)  # 7, 9, 10
    _store(run, f"iteration_{iteration}", collection, credited.credits)
    await run.collector.ack(run.directory.run_id, (*collection.rollouts, *collection.failed))
    credit_done = time.monotonic()
    update = await asyncio.to_thread(run.learner.update, credited.episodes, iteration=iteration)  # 8, 11
    updated = time.monotonic()
    progress = replace(
        progress,
        iteration=iteration,
        policy_version=progress.policy_version + 1,
        updates=progress.updates + int(update["optim/steps"]),
    )
    await run.server.publish(progress.policy_version)  # 12
    decisions = credited.metrics["decision/count"]
    row = {  # 13
        "kind": "iteration",
        "iteration": iteration,
        **episode_metrics(trajectories),
        **credited.metrics,
        **update,
        **collection_metrics(collection),
        "decision/unique_by_turn": unique_by_turn(trajectories),
        "policy/version": progress.policy_version,
        "time/collect_s": collected - started,
        "time/credit_s": credit_done - collected,
        "time/update_s": updated - credit_done,
        "time/publish_s": time.monotonic() - updated,
        "time/environment_s": sum(
            step.step_info.environment_s for item in trajectories for step in item.steps
        ),
        "time/policy_s": sum(step.step_info.policy_s for item in trajectories for step in item.steps),
        "perf/decisions_per_s": decisions / (time.monotonic() - started),
        "perf/collect_decisions_per_s": decisions / (collected - started),
    }
    run.directory.append_metrics(row)
    run.reporter.metrics(row)
    return progress


def credit(job: JobConfig, rollouts: Sequence[Rollout]) -> Credited:
    """Segments, r_t and advantages of finished rollouts. Pure: a stored file gives the same anywhere."""
    config = reward_config(job)
    trajectories = finished_trajectories(rollouts, "credit")
    rewards = [
        reward_vector(
            item.steps, outcome_reward=item.outcome_reward, config=config, rollout_id=rollout.rollout_id
        )
        for rollout, item in zip(rollouts, trajectories, strict=True)
    ]
    advantages = estimator(job.algorithm.advantage)(
        [
            EpisodeRewards(rollout.rollout_id, rollout.group_id, rewards_T)
            for rollout, rewards_T in zip(rollouts, rewards, strict=True)
        ],
        AdvantageConfig(gamma=job.algorithm.gamma),
    )
    episodes = [
        CreditedEpisode(
            rollout.rollout_id, segments_of(item.steps, rollout_id=rollout.rollout_id), advantages_T
        )
        for rollout, item, advantages_T in zip(rollouts, trajectories, advantages.per_episode, strict=True)
    ]
    credits = [Credit(*pair) for pair in zip(rewards, advantages.per_episode, strict=True)]
    return Credited(episodes, credits, {**decision_metrics(trajectories, rewards), **advantages.diagnostics})


def reward_config(job: JobConfig) -> RewardConfig:
    """The step-reward switches of [training], for `core.rewards`."""
    table = job.training
    return RewardConfig(
        enabled=table.step_rewards_enabled,
        mode=table.step_rewards_mode,
        kind=table.event_rewards_kind,
        beta=table.step_rewards_beta,
        indicator_lambda=table.step_rewards_indicator_lambda,
        horizon=table.step_rewards_horizon,
        max_decisions=job.rollout.max_turns,
    )


async def _evaluate_and_save(run: Run, progress: Progress, stop: asyncio.Event) -> Progress:
    """Play the held-out worlds; keep this checkpoint as the best if none was better."""
    started = time.monotonic()
    requests = run.planner.evaluation(str(progress.iteration))
    collection = await _collect(run, requests, f"evaluate {progress.iteration}", stop)
    if collection is None:
        return progress
    _store(run, f"evaluation_{progress.iteration}", collection, None)
    await run.collector.ack(run.directory.run_id, (*collection.rollouts, *collection.failed))
    row = {
        "kind": "evaluation",
        "iteration": progress.iteration,
        **evaluation_metrics(collection.rollouts),
        **collection_metrics(collection),
        "time/evaluate_s": time.monotonic() - started,
    }
    run.directory.append_metrics(row)
    run.reporter.metrics(row)
    score = row["eval/outcome_reward"]
    best = progress.best_evaluation is None or score > progress.best_evaluation
    progress = replace(progress, best_evaluation=score) if best else progress
    await _save(run, progress, best=best)
    return progress


async def _collect(
    run: Run, requests: Sequence[RolloutRequest], name: str, stop: asyncio.Event
) -> Collection | None:
    def tell(done: int, total: int) -> None:
        run.reporter.stage(name, done, total)

    return await until(stop, run.collector.collect(requests, tell))


async def _save(run: Run, progress: Progress, *, best: bool = False) -> None:
    folder = run.directory.checkpoints / f"iteration_{progress.iteration}"
    await asyncio.to_thread(run.learner.save, folder, progress)
    if best:
        mark_best(folder)
    prune_checkpoints(run.directory.checkpoints, run.job.training.keep_checkpoints)


def _store(run: Run, name: str, collection: Collection, credits: Sequence[Credit] | None) -> None:
    path = run.directory.rollouts_file(name)
    write_rollouts(path, (*collection.rollouts, *collection.failed), credits)
