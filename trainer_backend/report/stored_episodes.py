"""What the report reads from a run's Parquet files: flat columns, and the one episode that it shows."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from shared_schemas.rollouts import Rollout
from trainer_backend.collect.sources import row_of
from trainer_backend.core.policies import ACTOR, policy_in
from trainer_backend.core.statistics import Interval, mean_interval
from trainer_backend.report.story import Story
from trainer_backend.rundir.rollout_files import finished_rows, read_rollout


def reward_by_turn(paths: Sequence[Path], job_name: str) -> list[float]:
    """[T] mean r_t of each decision turn over the actor's episodes; one that ended earlier counts 0."""
    sums: defaultdict[int, float] = defaultdict(float)
    episodes = 0
    for path in paths:
        for row in finished_rows(path, ["decisions", "model"]):
            if policy_in(job_name, row["model"]) != ACTOR:
                continue  # what a fixed policy played stands in no curve of the actor
            episodes += 1
            for decision in row["decisions"]:
                sums[decision["turn"]] += decision["reward"] or 0.0
    return [sums[turn] / episodes for turn in range(1, max(sums, default=0) + 1)]


def paired_difference(first: Path, other: Path) -> Interval | None:
    """Mean of (other - first) in outcomes, world by world, over the worlds that both played."""
    before, after = _outcome_by_world(first), _outcome_by_world(other)
    shared = [world for world in before if world in after]
    return mean_interval([after[world] - before[world] for world in shared]) if shared else None


def last_minus_first(story: Story) -> Interval | None:
    """`paired_difference` of a run's last evaluation and its first; None without two stored ones."""
    if len(story.evaluations) < 2:
        return None
    iterations = (story.evaluations[0]["iteration"], story.evaluations[-1]["iteration"])
    first, last = (story.rollouts_file(f"evaluation_{iteration}") for iteration in iterations)
    return paired_difference(first, last) if first and last else None


def best_episode(path: Path) -> Rollout | None:
    """The finished episode with the highest outcome; of equals, the one with the fewest env steps."""
    rows = finished_rows(path, ["rollout_id", "outcome_reward", "env_steps"])
    if not rows:
        return None
    best = min(rows, key=lambda row: (-row["outcome_reward"], row["env_steps"], row["rollout_id"]))
    return read_rollout(path, best["rollout_id"])


def _outcome_by_world(path: Path) -> dict[str | int, float]:
    """By row of the data set where there is one, else by the seed of the world."""
    return {
        row_of(row["group_id"]) or row["seed"]: row["outcome_reward"]
        for row in finished_rows(path, ["group_id", "seed", "outcome_reward"])
    }
