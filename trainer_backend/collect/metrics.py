"""Computes the metrics of finished episodes for `metrics.jsonl`, `turnwise eval` and the report."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import Trajectory
from trainer_backend.collect.batch import AppFigures, Batch, count_cut_short
from trainer_backend.collect.losses import losses_in
from trainer_backend.collect.sources import read_row_id
from trainer_backend.core.conversations import context_metrics, interaction_metrics
from trainer_backend.core.intervals import achievement_shares, crafter_score_interval, nested_rate_interval
from trainer_backend.core.metric import Metric, Row
from trainer_backend.core.statistics import (
    CRAFTER,
    Interval,
    bounded,
    by_world,
    env_reward,
    episode_metrics,
    have_achievements,
    outcome_definition,
    over_worlds,
    progress,
    unique_achievements,
    user_reward_metrics,
)
from trainer_backend.errors import NothingToLearnFrom

EVALUATION_METRICS = (
    Row(
        Metric("eval/outcome_reward", "mean outcome", "outcome", {"evaluation": "held-out"}),
        Metric("eval/decisions", "mean decisions of an episode"),
        Metric("eval/invalid_frac", "share of refused decisions", "invalid", {"evaluation": "held-out"}),
        Metric("eval/episodes", "worlds or rows that were played"),
        Metric("eval/unit", "`world` or `row`"),
        Metric("eval/cut_short", "episodes that their time limit cut short, absent without any"),
        when="on held-out worlds or rows",
    ),
    Row(
        Metric("eval/unique_achievements", "unique achievements, mean", "unique", {"evaluation": "held-out"}),
        Metric("eval/success_rates/*", "success rates"),
        Metric("eval/crafter_score", "in Crafter its score", "score", {"evaluation": "score"}),
        Metric("eval/progress", "the mean share of the achievements, in percent", "score",
               {"evaluation": "progress"}),
        Metric("eval/env_reward", "the environment's own reward"),
        when="the same, where there are achievements",
    ),
    Row(
        Metric("eval/tasks_digest", "digest of the worlds or rows of the evaluation with the environment's "
               "config and limits"),
        note="Figures of evaluations with different digests are not comparable",
    ),
    Row(
        Metric("eval/outcome_definition", "what the environment calls its outcome"),
        Metric("episode/outcome_definition", "the same in training"),
        note="A name and, after a colon, its meaning. Terminal and report use that name",
    ),
    Row(
        Metric("eval/environment_outcome_reward", "the environment's own outcome"),
        when="only with a reward function",
    ),
)  # fmt: skip


def evaluation_metrics(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Compute the metrics of an evaluation, such as the mean outcome with its 95 % interval.

    Metrics of achievements and conversations are included if the episodes have any.

    Raises:
        NothingToLearnFrom: no rollout finished.
    """
    trajectories = finished_trajectories(rollouts, "evaluation")
    worlds = [rollout.group_id for rollout in rollouts if rollout.trajectory is not None]
    outcome = outcome_over_worlds(trajectories, worlds)
    episodes = episode_metrics(trajectories)
    own = user_reward_metrics(trajectories).get("episode/environment_outcome_reward")
    cut_short = count_cut_short(trajectories)
    return {
        "eval/episodes": len(trajectories),
        **({"eval/cut_short": cut_short} if cut_short else {}),
        "eval/unit": "world" if read_row_id(rollouts[0].group_id) is None else "row",
        **_with_bounds("eval/outcome_reward", outcome),
        "eval/outcome_definition": outcome_definition(trajectories),
        **({} if own is None else {"eval/environment_outcome_reward": own}),
        **(_achievement_metrics(trajectories, worlds) if have_achievements(trajectories) else {}),
        **interaction_metrics(trajectories),
        **context_metrics(trajectories),
        "eval/decisions": episodes["episode/decisions"],
        "eval/invalid_frac": episodes["episode/invalid_frac"],
    }


def count_worlds(row: Mapping[str, Any]) -> str:
    """Describe how many worlds or rows an evaluation played, given its row of metrics.

    The text is `32 worlds` if the evaluation is complete, and otherwise, for example, `16 of 32 worlds, 3 cut
    short by the time limit`.
    """
    losses, unit, cut = losses_in(row), row.get("eval/unit", "episode"), row.get("eval/cut_short", 0)
    total = f" of {losses.total}" if losses.lost else ""
    limited = f", {cut} cut short by the time limit" if cut else ""
    return f"{row['eval/episodes']}{total} {unit}s{limited}"


def outcome_over_worlds(episodes: Sequence[Trajectory], worlds: Sequence[str]) -> Interval:
    """Return the mean outcome, with a 95 % interval that treats the worlds as independent samples.

    If all outcomes are 0 or 1, it is Wilson's interval. If outcomes are numbers of achievements, it is
    clipped to the possible range.

    Args:
        worlds: the world of each episode; episodes of one world are not independent.
    """
    if _counts_achievements(episodes):
        return unique_over_worlds(episodes, worlds)
    outcomes = [item.outcome_reward for item in episodes]
    if are_successes(episodes):
        return nested_rate_interval(by_world(outcomes, worlds, fmean), len(outcomes))
    return over_worlds(outcomes, worlds)


def unique_over_worlds(episodes: Sequence[Trajectory], worlds: Sequence[str]) -> Interval:
    """Return the mean number of achievements that an episode unlocked, with its 95 % interval over worlds."""
    total = len({name for item in episodes for name in item.achievements_counts})
    interval = over_worlds([float(unique_achievements(item)) for item in episodes], worlds)
    return bounded(interval, 0.0, float(total))


def are_successes(episodes: Sequence[Trajectory]) -> bool:
    """Return whether all outcomes are 0 or 1 and stand for success, and not for numbers of achievements."""
    return {item.outcome_reward for item in episodes} <= {0.0, 1.0} and not _counts_achievements(episodes)


def _counts_achievements(episodes: Sequence[Trajectory]) -> bool:
    """Return whether outcomes are numbers of achievements. If all are 0, the outcome's definition decides."""
    return (
        have_achievements(episodes)
        and all(item.outcome_reward == unique_achievements(item) for item in episodes)
        and (
            any(item.outcome_reward for item in episodes)
            or outcome_definition(episodes).startswith(UNIQUE_ACHIEVEMENTS)
        )
    )


def rates_over_worlds(episodes: Sequence[Trajectory], worlds: Sequence[str]) -> dict[str, Interval]:
    """Return a success rate with its 95 % interval for each achievement.

    The rate is the share of a world's episodes that unlocked the achievement, averaged over worlds.
    """
    shares = achievement_shares([item.achievements_counts for item in episodes], worlds)
    return {name: nested_rate_interval(shares_W, len(episodes)) for name, shares_W in shares.items()}


def score_over_worlds(episodes: Sequence[Trajectory], worlds: Sequence[str]) -> Interval | None:
    """Return the Crafter score with its 95 % interval, or None if the environment is not Crafter."""
    if any(item.env_name != CRAFTER or not item.achievements_counts for item in episodes):
        return None
    return crafter_score_interval([item.achievements_counts for item in episodes], worlds)


def _achievement_metrics(trajectories: Sequence[Trajectory], worlds: Sequence[str]) -> dict[str, Any]:
    rates, score = rates_over_worlds(trajectories, worlds), score_over_worlds(trajectories, worlds)
    return {
        **_with_bounds("eval/unique_achievements", unique_over_worlds(trajectories, worlds)),
        "eval/success_rates": {name: rate.mean for name, rate in rates.items()},
        **(_with_bounds("eval/crafter_score", score) if score is not None else {}),
        **_with_bounds("eval/progress", progress(trajectories, worlds)),
        **_with_bounds("eval/env_reward", over_worlds([env_reward(item) for item in trajectories], worlds)),
    }


def _with_bounds(name: str, interval: Interval) -> dict[str, float | None]:
    return {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}


APP_METRICS = (
    Row(
        Metric("app/finished/*", "rollouts that it finished"),
        Metric("app/lost/*", "its unfinished rollouts when it was lost, which were requested again"),
        Metric("app/outages/*", "how often it stopped answering"),
        Metric("app/answers/*", "1 if it answered at the end"),
        when="by host and port of the task app (`own`: the job's own; of several `own-0`, `own-1` and so on)",
    ),
    Row(
        Metric("app/seconds_per_decision/*", "the seconds that its episodes took, divided by their decisions",
               "apps"),
        when="by task app",
        note="Its episodes run at the same time",
    ),
)  # fmt: skip


def batch_metrics(batch: Batch) -> dict[str, Any]:
    """Return the numbers of finished, failed and reused rollouts, and figures by failure code and app."""
    return {
        **batch.losses.row(),
        "recovery/rollouts_reused": float(len(batch.reused)),
        **{f"rollout/failure/{code}": float(n) for code, n in sorted(batch.failures.items())},
        **_app_metrics(batch.apps),
    }


def _app_metrics(apps: Mapping[str, AppFigures]) -> dict[str, dict[str, float]]:
    """Return the metrics by task app; empty if the stage was read from disk after the run was resumed."""
    if not apps:
        return {}
    return {
        "app/finished": {name: float(figures.finished) for name, figures in apps.items()},
        "app/lost": {name: float(figures.losses) for name, figures in apps.items()},
        "app/outages": {name: float(figures.outages) for name, figures in apps.items()},
        "app/answers": {name: float(figures.answers) for name, figures in apps.items()},
        "app/seconds_per_decision": {
            name: figures.wall_s / figures.decisions for name, figures in apps.items() if figures.decisions
        },
    }


def finished_trajectories(rollouts: Sequence[Rollout], stage: str) -> list[Trajectory]:
    """Return the trajectories of the finished rollouts. Raise NothingToLearnFrom if there are none."""
    trajectories = [rollout.trajectory for rollout in rollouts if rollout.trajectory is not None]
    if not trajectories:
        raise NothingToLearnFrom(f"{stage}: no rollout was finished")
    return trajectories


# A definition of an outcome is its name, optionally followed by a colon and an explanation. Rows without a
# definition were written by older versions, which supported only Crafter; its outcome has this name.
UNIQUE_ACHIEVEMENTS = "unique achievements"


def outcome_name(row: Mapping[str, Any] | None) -> str:
    """Return the name of the outcome in a row of metrics, or "outcome" if there is no row."""
    return "outcome" if row is None else _definition(row).partition(":")[0]


def outcome_meaning(row: Mapping[str, Any] | None) -> str:
    """Return the explanation of the outcome in a row of metrics; empty if its definition contains none."""
    return "" if row is None else _definition(row).partition(":")[2].strip()


def outcome_interval(row: Mapping[str, Any]) -> Interval:
    """Return the mean outcome with its 95 % interval from a row of metrics of an evaluation or a teacher.

    The bounds are None for a single episode.
    """
    name = "eval/outcome_reward" if "eval/outcome_reward_low" in row else "eval/unique_achievements"
    return Interval(row[name], row.get(f"{name}_low"), row.get(f"{name}_high"), row["eval/episodes"])


def _definition(row: Mapping[str, Any]) -> str:
    room = "episode" if row["kind"] == "iteration" else "eval"
    return str(row.get(f"{room}/outcome_definition", UNIQUE_ACHIEVEMENTS))
