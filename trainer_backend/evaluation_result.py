"""The figures of `turnwise eval`, for people and for programs. Pure."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import Group
from rich.table import Table
from rich.text import Text

from shared_schemas.trajectory import Trajectory
from trainer_backend.collect.collector import Collection
from trainer_backend.core.proportions import wilson_interval
from trainer_backend.core.statistics import (
    Interval,
    crafter_score,
    episode_metrics,
    mean_interval,
    success_rates,
    unique_achievements,
    unique_by_turn,
)
from trainer_backend.evaluation import finished_trajectories


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What came of an evaluation.

    Attributes:
        policy: a folder, or a policy's name.
        unique, outcome, decisions: means over episodes, a world each.
        rates: share of episodes that unlocked each achievement.
        unique_by_turn: [T] mean unique_delta of each decision turn; an ended episode counts 0.
        crafter_score: in percent; 0 for an environment without achievements.
        invalid_frac: share of decisions that were refused.
        endings: episodes by stop reason.
        failures: failure codes met, and how often; such episodes are in no figure.
    """

    policy: str
    unique: Interval
    outcome: Interval
    decisions: Interval
    rates: Mapping[str, Interval]
    unique_by_turn: tuple[float, ...]
    crafter_score: float
    invalid_frac: float
    endings: Mapping[str, int]
    failures: Mapping[str, int]


def evaluated(policy: str, collection: Collection) -> Evaluated:
    """The figures of played episodes. Pure.

    Raises:
        NothingToLearnFrom: no episode finished.
    """
    episodes = finished_trajectories(collection.rollouts, "evaluation")
    metrics = episode_metrics(episodes)
    endings = {
        name.removeprefix("stop/"): round(share * len(episodes))
        for name, share in metrics.items()
        if name.startswith("stop/")
    }
    return Evaluated(
        policy=policy,
        unique=mean_interval([float(unique_achievements(item)) for item in episodes]),
        outcome=mean_interval([item.outcome_reward for item in episodes]),
        decisions=mean_interval([float(len(item.steps)) for item in episodes]),
        rates=_rates(episodes),
        unique_by_turn=tuple(unique_by_turn(episodes)),
        crafter_score=crafter_score(success_rates(episodes)),
        invalid_frac=metrics["episode/invalid_frac"],
        endings=endings,
        failures=dict(sorted(collection.failures.items())),
    )


def tables(result: Evaluated) -> Group:
    """The figures for a terminal."""
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_row("policy", Text(result.policy))  # Text: what is in brackets is no markup
    facts.add_row("episodes", str(result.unique.count))
    facts.add_row("unique achievements", _interval(result.unique, "{:.2f}"))
    facts.add_row("decisions", _interval(result.decisions, "{:.1f}"))
    facts.add_row("Crafter score", f"{result.crafter_score:.1f} %")
    facts.add_row("invalid decisions", f"{result.invalid_frac:.2%}")
    facts.add_row("ended by", _counts(sorted(result.endings.items())))
    facts.add_row("failures", _counts(result.failures.items()))
    rates = Table("achievement", "episodes", "95 %", box=None, pad_edge=False)
    for name, rate in sorted(result.rates.items(), key=lambda item: (-item[1].mean, item[0])):
        rates.add_row(Text(name), f"{rate.mean:.1%}", _interval(rate, "{:.1%}").partition(" ")[2])
    turns = Table("turns", "unique achievements a decision", box=None, pad_edge=False)
    for first in range(0, len(result.unique_by_turn), 10):
        part = result.unique_by_turn[first : first + 10]
        turns.add_row(f"{first + 1} to {first + len(part)}", " ".join(f"{value:.2f}" for value in part))
    return Group(facts, "", rates, "", turns)


def as_json(result: Evaluated) -> str:
    """The figures as JSON; what is not known (a bound of one episode) is null."""
    return json.dumps(asdict(result), indent=2, allow_nan=False) + "\n"


def _counts(items: Iterable[tuple[str, int]]) -> Text:
    return Text(", ".join(f"{name} {count}" for name, count in items) or "none")


def _rates(episodes: Sequence[Trajectory]) -> dict[str, Interval]:
    return {
        name: wilson_interval(round(rate * len(episodes)), len(episodes))
        for name, rate in success_rates(episodes).items()
    }


def _interval(found: Interval, form: str) -> str:
    if found.low is None or found.high is None:
        return form.format(found.mean)
    return f"{form.format(found.mean)} (95 % {form.format(found.low)} to {form.format(found.high)})"
