"""Computes the figures of `turnwise eval` from played episodes, with 95 % intervals. Pure."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from shared_schemas.trajectory import DecisionRewards, Trajectory
from trainer_backend.collect.batch import Batch
from trainer_backend.collect.metrics import (
    are_successes,
    finished_trajectories,
    outcome_over_worlds,
    rates_over_worlds,
    score_over_worlds,
    unique_over_worlds,
)
from trainer_backend.collect.sources import read_row_id
from trainer_backend.core.conversations import context_metrics, interaction_metrics
from trainer_backend.core.intervals import wilson_interval
from trainer_backend.core.statistics import (
    Interval,
    average_by_turn,
    by_world,
    env_reward,
    episode_metrics,
    have_achievements,
    outcome_definition,
    over_worlds,
    progress,
    step_deltas,
    sum_known,
)

_MOST_SPANS = 12


@dataclass(frozen=True, slots=True)
class TurnSpan:
    """Figures of decisions `first` to `last` of all episodes. Decisions after an episode's end count as 0."""

    first: int
    last: int
    playing: int
    """Number of episodes that reached decision `first`."""
    unique: Interval
    """Sum of an episode's unique_delta in the span, averaged over worlds. `ach` is the sum of ach_delta."""
    ach: Interval
    rewarded: float
    """Share of the span's played decisions that unlocked a new achievement."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Figures of the episodes that a policy played.

    Means are over worlds, or over rows of a data set: episodes of one world are averaged first.
    """

    policy: str
    """The policy's folder or name; of a remote model, its name and its server."""
    models: tuple[str, ...]
    """The names of the models that answered; empty for a policy without a model."""
    setting: Mapping[str, Any]
    """Settings of environment, limits and sampling, by name."""
    outcome: Interval
    """Mean of the episodes' `outcome_reward`."""
    episodes: int
    repeats: int
    """The largest number of finished episodes of one world."""
    solved_in_any: Interval | None
    """Share of worlds that were solved in at least one repeat. None if `repeats` is 1, or if outcomes do not
    stand for success or failure."""
    outcome_definition: str
    unique: Interval | None
    """Mean number of unlocked achievements. If the environment has no achievements, this is None, and
    `rates`, `unique_by_turn`, `ach_by_turn` and `spans` are empty."""
    conversation: Mapping[str, Any]
    """The metrics interaction/* and statelm/* (docs/metrics.md); empty if no episode was a conversation."""
    decisions: Interval
    env_steps: Interval
    env_reward: Interval
    """Mean sum of the environment's own rewards in an episode."""
    progress: Interval | None
    """Mean share of all achievements that an episode unlocked, in percent; None without achievements."""
    rates: Mapping[str, Interval]
    """Mean share of episodes that unlocked an achievement, by achievement."""
    unique_by_turn: tuple[float, ...]
    """[T] mean unique_delta over all episodes, by turn; an episode that has ended counts as 0."""
    ach_by_turn: tuple[float, ...]
    spans: tuple[TurnSpan, ...]
    crafter_score: Interval | None
    """The Crafter score in percent; None in other environments."""
    invalid_frac: float
    """Share of decisions that were refused as invalid."""
    endings: Mapping[str, int]
    """Number of episodes by stop reason."""
    rows: Mapping[str, float]
    """Mean outcome of each held-out row by its id; empty without a data set."""
    row_places: Mapping[str, str]
    """File and line of each held-out row by its id."""
    lost: int
    """Number of episodes lost to failures. No mean or share includes these episodes."""
    lost_because: str
    failures: Mapping[str, int]
    """Number of failures by code, including those of attempts that were repeated with success."""
    prompt_tokens: int | None
    """Sum over all episodes; None if no server reports it. This is also true of `sampled_tokens`."""
    sampled_tokens: int | None


def evaluation_result(
    policy: str,
    batch: Batch,
    setting: Mapping[str, Any] | None = None,
    *,
    row_places: Mapping[str, str] | None = None,
) -> EvaluationResult:
    """Compute the figures of played episodes.

    Args:
        setting: the settings of the evaluation, by name; values are JSON values.
        row_places: file and line of each row of a data set, by id.
    """
    episodes = finished_trajectories(batch.rollouts, "evaluation")
    worlds = [item.group_id for item in batch.rollouts if item.trajectory is not None]
    repeats, has_achievements = max(Counter(worlds).values()), have_achievements(episodes)
    metrics, losses = episode_metrics(episodes), batch.losses
    by_turn = average_by_turn(episodes) if has_achievements else {}
    endings = {
        name.removeprefix("stop/"): round(share * len(episodes))
        for name, share in metrics.items()
        if name.startswith("stop/")
    }
    return EvaluationResult(
        policy=policy,
        models=tuple(sorted({item.model for item in episodes if item.model})),
        setting=dict(setting or {}),
        outcome=outcome_over_worlds(episodes, worlds),
        episodes=len(episodes),
        repeats=repeats,
        solved_in_any=_solved_in_any(episodes, worlds) if repeats > 1 else None,
        outcome_definition=outcome_definition(episodes),
        unique=unique_over_worlds(episodes, worlds) if has_achievements else None,
        conversation={**interaction_metrics(episodes), **context_metrics(episodes)},
        decisions=over_worlds([float(len(item.steps)) for item in episodes], worlds),
        env_steps=over_worlds([float(item.env_steps) for item in episodes], worlds),
        env_reward=over_worlds([env_reward(item) for item in episodes], worlds),
        progress=progress(episodes, worlds) if has_achievements else None,
        rates=rates_over_worlds(episodes, worlds),
        unique_by_turn=tuple(by_turn.get("decision/unique_by_turn", ())),
        ach_by_turn=tuple(by_turn.get("decision/ach_by_turn", ())),
        spans=turn_spans(episodes, worlds) if has_achievements else (),
        crafter_score=score_over_worlds(episodes, worlds),
        invalid_frac=metrics["episode/invalid_frac"],
        endings=endings,
        rows=_outcome_by_row(batch),
        row_places=dict(row_places or {}),
        lost=losses.lost,
        lost_because=losses.explain() if losses.lost else "",
        failures=dict(sorted(batch.failures.items())),
        prompt_tokens=sum_known([step.step_info.prompt_tokens for item in episodes for step in item.steps]),
        sampled_tokens=sum_known(
            [step.step_info.completion_tokens for item in episodes for step in item.steps]
        ),
    )


def as_json(result: EvaluationResult) -> str:
    """Return the figures as JSON text. Undefined ones, such as the interval of a single episode, are null."""
    return json.dumps(asdict(result), indent=2, allow_nan=False) + "\n"


def turn_spans(episodes: Sequence[Trajectory], worlds: Sequence[str]) -> tuple[TurnSpan, ...]:
    """Split the turns of the longest episode into at most 12 spans of equal length."""
    deltas = [[step_deltas(step) for step in episode.steps] for episode in episodes]
    longest = max(map(len, deltas), default=0)
    width = span_width(longest)
    return tuple(
        _span(first + 1, min(first + width, longest), deltas, worlds) for first in range(0, longest, width)
    )


def span_width(turns: int) -> int:
    """Return the smallest width of 1, 2, 5, 10, 20, 50 ... that splits the turns into at most 12 spans."""
    widths = (digit * int(10**power) for power in range(20) for digit in (1, 2, 5))
    return next(width for width in widths if math.ceil(turns / width) <= _MOST_SPANS)


def _span(
    first: int, last: int, deltas: Sequence[Sequence[DecisionRewards]], worlds: Sequence[str]
) -> TurnSpan:
    parts = [episode[first - 1 : last] for episode in deltas]
    decisions = [delta for part in parts for delta in part]
    return TurnSpan(
        first=first,
        last=last,
        playing=sum(map(bool, parts)),
        unique=over_worlds([float(sum(delta.unique_delta for delta in part)) for part in parts], worlds),
        ach=over_worlds([float(sum(delta.ach_delta for delta in part)) for part in parts], worlds),
        rewarded=sum(delta.unique_delta > 0 for delta in decisions) / len(decisions),
    )


def _outcome_by_row(batch: Batch) -> dict[str, float]:
    outcomes: dict[str, list[float]] = {}
    for rollout in batch.rollouts:
        if rollout.trajectory is not None and (row_id := read_row_id(rollout.group_id)) is not None:
            outcomes.setdefault(row_id, []).append(rollout.trajectory.outcome_reward)
    return {row_id: fmean(several) for row_id, several in outcomes.items()}


def _solved_in_any(episodes: Sequence[Trajectory], worlds: Sequence[str]) -> Interval | None:
    """Return the share of worlds that were solved at least once, with Wilson's interval."""
    if not are_successes(episodes):
        return None
    solved = by_world([item.outcome_reward for item in episodes], worlds, max)
    return wilson_interval(round(sum(solved)), len(solved))
