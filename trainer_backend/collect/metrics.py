"""The figures of played episodes for `metrics.jsonl`, `turnwise eval` and the report."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import Trajectory
from trainer_backend.collect.work import AppFigures, Collection
from trainer_backend.core.conversations import context_metrics, interaction_metrics
from trainer_backend.core.statistics import (
    Interval,
    crafter_score,
    episode_metrics,
    have_achievements,
    mean_interval,
    outcome_definition,
    success_rates,
    unique_achievements,
    user_reward_metrics,
)
from trainer_backend.errors import NothingToLearnFrom


def evaluation_metrics(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Mean outcome with its 95 % interval; what there is of achievements and of conversations beside it."""
    trajectories = finished_trajectories(rollouts, "evaluation")
    outcome = mean_interval([item.outcome_reward for item in trajectories])
    episodes = episode_metrics(trajectories)
    own = user_reward_metrics(trajectories).get("episode/environment_outcome_reward")
    return {
        "eval/episodes": outcome.count,
        **_with_bounds("eval/outcome_reward", outcome),
        "eval/outcome_definition": outcome_definition(trajectories),
        **({} if own is None else {"eval/environment_outcome_reward": own}),
        **(_achievement_metrics(trajectories) if have_achievements(trajectories) else {}),
        **interaction_metrics(trajectories),
        **context_metrics(trajectories),
        "eval/decisions": episodes["episode/decisions"],
        "eval/invalid_frac": episodes["episode/invalid_frac"],
    }


def _achievement_metrics(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    unique = mean_interval([float(unique_achievements(item)) for item in trajectories])
    rates = success_rates(trajectories)
    return {
        **_with_bounds("eval/unique_achievements", unique),
        "eval/success_rates": rates,
        "eval/crafter_score": crafter_score(rates),
    }


def _with_bounds(name: str, found: Interval) -> dict[str, float | None]:
    return {name: found.mean, f"{name}_low": found.low, f"{name}_high": found.high}


def collection_metrics(collection: Collection) -> dict[str, Any]:
    """How many rollouts came back, why others did not, and what each task app did."""
    causes = {f"rollout/failure/{code}": float(n) for code, n in sorted(collection.failures.items())}
    return {
        "rollout/finished": float(len(collection.rollouts)),
        "rollout/failed": float(len(collection.failed)),
        "recovery/rollouts_reused": float(len(collection.reused)),
        **causes,
        **_app_metrics(collection.apps),
    }


def _app_metrics(apps: Mapping[str, AppFigures]) -> dict[str, dict[str, float]]:
    """By host and port of the task app; a stage that was stored before knows none."""
    if not apps:
        return {}
    return {
        "app/finished": {name: float(figures.finished) for name, figures in apps.items()},
        "app/lost": {name: float(figures.lost) for name, figures in apps.items()},
        "app/outages": {name: float(figures.outages) for name, figures in apps.items()},
        "app/answers": {name: float(figures.answers) for name, figures in apps.items()},
        "app/seconds_per_decision": {
            name: figures.seconds_per_decision
            for name, figures in apps.items()
            if figures.seconds_per_decision is not None
        },
    }


def refuse_empty(collection: Collection, stage: str, *, log: Path | None = None) -> None:
    """Say why nothing came back; the collection itself is stored by then.

    Args:
        log: where a task app of our own may have logged; absent: where its operator looks.
    """
    if collection.rollouts:
        return
    counts = ", ".join(f"{count} x {code}" for code, count in collection.failures.most_common())
    example = next((item for item in collection.failed if item.failure is not None), None)
    told = f"; {example.rollout_id}: {example.failure.detail}" if example and example.failure else ""
    where = f"the task app's log ({log})" if log is not None and log.exists() else "the task app's log"
    raise NothingToLearnFrom(
        f"{stage}: none of {len(collection.failed)} rollouts was finished ({counts or 'no failures'}{told})",
        hint=f"Failures are counted over both attempts; {where} says more.",
    )


def finished_trajectories(rollouts: Sequence[Rollout], stage: str) -> list[Trajectory]:
    """The trajectories of the finished rollouts."""
    found = [rollout.trajectory for rollout in rollouts if rollout.trajectory is not None]
    if not found:
        raise NothingToLearnFrom(f"{stage}: no rollout was finished")
    return found


# A definition may explain itself after a colon; the part before the colon is the outcome's name.

# Rows of before they named their outcome are all of Crafter.
_UNIQUE = "unique achievements"


def outcome_name(row: Mapping[str, Any] | None) -> str:
    """The name of a row's outcome, of whatever kind of row; without a row, just that."""
    return "outcome" if row is None else _definition(row).partition(":")[0]


def outcome_meaning(row: Mapping[str, Any] | None) -> str:
    """What the definition says beyond the name; often nothing."""
    return "" if row is None else _definition(row).partition(":")[2].strip()


def outcome_interval(row: Mapping[str, Any]) -> Interval:
    """Of the episodes of an evaluation, or of a teacher; the bounds are missing for a lone one."""
    name = "eval/outcome_reward" if "eval/outcome_reward_low" in row else "eval/unique_achievements"
    return Interval(row[name], row.get(f"{name}_low"), row.get(f"{name}_high"), row["eval/episodes"])


def _definition(row: Mapping[str, Any]) -> str:
    room = "episode" if row["kind"] == "iteration" else "eval"
    return str(row.get(f"{room}/outcome_definition", _UNIQUE))
