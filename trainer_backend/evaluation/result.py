"""The figures of `turnwise eval`: numbers with 95 % intervals from played episodes. Pure."""

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
    """Decisions `first` to `last` of all episodes; an episode that ended earlier counts 0."""

    first: int
    last: int
    playing: int
    """Episodes that reached decision `first`."""
    unique: Interval
    """Mean over episodes of the sum of unique_delta in the span; `ach`: the same for ach_delta."""
    ach: Interval
    rewarded: float
    """Share of the span's decisions that unlocked something."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The figures of the episodes that a policy played; intervals are over worlds or rows."""

    policy: str
    """Its folder or its name, or a model and its server."""
    models: tuple[str, ...]
    """The model's names at its server; empty without a model."""
    setting: Mapping[str, Any]
    """Environment, limits and sampling."""
    outcome: Interval
    """Mean over episodes; so are `decisions`, `env_steps` and `env_reward`."""
    episodes: int
    repeats: int
    """The largest number of episodes that one world has."""
    solved_in_any: Interval | None
    """Share of worlds with a success in any repeat; None for one repeat, or if any outcome is not 0 or 1."""
    outcome_definition: str
    unique: Interval | None
    """Mean number of unlocked achievements; None without achievements, and then `rates`, `unique_by_turn`,
    `ach_by_turn` and `spans` are empty."""
    conversation: Mapping[str, Any]
    """The metrics interaction/* and statelm/* (docs/metrics.md); empty unless episodes have a history."""
    decisions: Interval
    env_steps: Interval
    env_reward: Interval
    """The environment's own reward, summed over an episode."""
    progress: Interval | None
    """Share of all achievements, in percent; None without achievements."""
    rates: Mapping[str, Interval]
    """Share of episodes that unlocked each achievement."""
    unique_by_turn: tuple[float, ...]
    """[T] mean unique_delta of each decision turn; an ended episode counts 0."""
    ach_by_turn: tuple[float, ...]
    spans: tuple[TurnSpan, ...]
    crafter_score: Interval | None
    """In percent; None outside Crafter."""
    invalid_frac: float
    """Share of refused decisions."""
    endings: Mapping[str, int]
    """Episodes by stop reason."""
    rows: Mapping[str, float]
    """Outcome of each held-out row by its id; empty without a data set."""
    row_places: Mapping[str, str]
    """File and line of each held-out row by its id."""
    lost: int
    """Worlds without an episode, which no figure includes."""
    lost_because: str
    failures: Mapping[str, int]
    """Counts of failure codes, also of attempts that a later attempt made good."""
    prompt_tokens: int | None
    """Over all episodes, like `sampled_tokens`; None if no server counts them."""
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
        setting: names and JSON values that describe the evaluation.
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
    """Return the figures as JSON; unknown ones, such as the bounds of a single episode, are null."""
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
    """Return the least of 1, 2, 5, 10, 20, 50 ... that gives at most 12 spans."""
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
