"""What an iteration has gathered before its update, and what a row of metrics says of it. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import Trajectory
from trainer_backend.collect.collector import Collection
from trainer_backend.core.conversations import (
    context_metrics,
    failure_metrics,
    interaction_metrics,
    segment_metrics,
)
from trainer_backend.core.segments import segments_of
from trainer_backend.core.statistics import (
    ach_by_turn,
    episode_metrics,
    group_interval,
    outcome_definition,
    unique_by_turn,
)
from trainer_backend.credit import Credited
from trainer_backend.evaluation.metrics import collection_metrics


@dataclass(frozen=True, slots=True)
class IterationResult:
    """Stops 2 to 10 of an iteration: collected, credited, stored.

    Attributes:
        branches: rollouts that were played on from decisions of those collected; measured with, not trained.
        refilled: groups that were asked for beyond the plan, in place of flat ones.
        started, ended: on the monotonic clock; collect_s of what lies between went into collecting.
        mixture: who sampled, and what that was worth (`mixture.rollout_metrics`).
    """

    collection: Collection
    branches: Collection
    trajectories: list[Trajectory]
    credited: Credited
    inference: dict[str, float]
    refilled: int
    started: float
    collect_s: float
    ended: float
    mixture: Mapping[str, float] = field(default_factory=dict)


def iteration_metrics(result: IterationResult, own: Sequence[Rollout], *, ended: float) -> dict[str, Any]:
    """What the rollouts of an iteration that ended at `ended` say of themselves.

    What tells how well is played is of the actor's rollouts alone, and absent where it has none; what tells
    of time and of failures is of all.

    Args:
        own: the actor's rollouts of it.
    """
    episodes = [rollout.trajectory for rollout in own if rollout.trajectory is not None]
    steps = [step.step_info for item in result.trajectories for step in item.steps]
    played_on = branch_metrics(result.branches)
    decisions = len(steps) + played_on.get("branch/decisions", 0.0) - _reused_decisions(result)
    return {
        **(episode_metrics(episodes) if episodes else {}),
        **outcome_bounds(own),
        "episode/outcome_definition": outcome_definition(result.trajectories),
        **result.credited.metrics,
        **conversation_metrics(own, result.collection.failures),
        **collection_metrics(result.collection),
        "recovery/rollouts_reused": float(len(result.collection.reused) + len(result.branches.reused)),
        **played_on,
        **result.mixture,
        **(result.inference if own else {}),
        **(_by_turn(episodes) if episodes else {}),
        "group/refilled": float(result.refilled),
        "time/collect_s": result.collect_s,
        "time/credit_s": result.ended - result.started - result.collect_s,
        "time/environment_s": sum(step.environment_s for step in steps),
        "time/interaction_s": sum(step.interaction_s for step in steps),
        "time/policy_s": sum(step.policy_s for step in steps),
        "perf/decisions_per_s": decisions / (ended - result.started),
        "perf/collect_decisions_per_s": decisions / result.collect_s,
    }


def _by_turn(episodes: Sequence[Trajectory]) -> dict[str, list[float]]:
    return {
        "decision/unique_by_turn": unique_by_turn(episodes),
        "decision/ach_by_turn": ach_by_turn(episodes),
    }


def _reused_decisions(result: IterationResult) -> int:
    """Of an earlier start: no work of this one, whose speed is told."""
    return sum(
        len(item.trajectory.steps)
        for part in (result.collection, result.branches)
        for item in part.rollouts
        if item.rollout_id in part.reused and item.trajectory is not None
    )


def outcome_bounds(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """95 % interval of the mean outcome, over groups; nothing where there is only one."""
    found = group_interval(
        (item.group_id, item.trajectory.outcome_reward) for item in rollouts if item.trajectory is not None
    )
    if found is None or found.low is None or found.high is None:
        return {}
    return {"episode/outcome_reward_low": found.low, "episode/outcome_reward_high": found.high}


def conversation_metrics(rollouts: Sequence[Rollout], failures: Counter[str]) -> dict[str, Any]:
    """What conversations tell of themselves; nothing where none were played.

    Args:
        failures: by code, of all rollouts that were asked for.
    """
    trajectories = [item.trajectory for item in rollouts if item.trajectory is not None]
    answered = interaction_metrics(trajectories)
    failed = failure_metrics(failures)
    kept = [
        segments_of(item.trajectory.steps, rollout_id=item.rollout_id)
        for item in rollouts
        if item.trajectory is not None and item.trajectory.full_history
    ]
    return {
        **answered,
        **(failed if answered or any(failed.values()) else {}),
        **context_metrics(trajectories),
        **segment_metrics(kept),
    }


def branch_metrics(branches: Collection) -> dict[str, float]:
    """What was played on from decisions; nothing where no estimator asked for it."""
    if not branches.all:
        return {}
    decisions = sum(len(item.trajectory.steps) for item in branches.rollouts if item.trajectory is not None)
    return {
        "branch/rollouts": float(len(branches.rollouts)),
        "branch/failed": float(len(branches.failed)),
        "branch/decisions": float(decisions),
    }


def inference_metrics(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What was inferred between two looks at `InferenceServer.totals`. Pure.

    A step samples one token for every request that runs, so their mean number is tokens a step. What
    truncation took away is a mean over the tokens that were sampled under it; absent where none was.
    """
    used = {name: float(after[name] - before[name]) for name in after}
    steps, truncated, lost = used["steps"], used.pop("truncated_tokens"), used.pop("lost_mass")
    return {
        **{f"inference/{name}": count for name, count in used.items()},
        "inference/mean_running": used["sampled_tokens"] / steps if steps else 0.0,
        **({"inference/lost_mass": lost / truncated} if truncated else {}),
    }
