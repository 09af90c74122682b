"""Pure: the `step_rewards` of a legacy rollout, and what its `stepwise` blocks say.

    r_t = base_t + indicator_t * (indicator_lambda + step_beta * (T - t)),      t from 0
    indicator_t = 1 if unique_delta_t > 0, else 0

base_t is unique_delta (or ach_delta, kind `absolute`); with the strategy `per_achievement` it is the sum of
the weights of what was achieved, each achievement credited `k_limits` times an episode (1 when absent, <= 0
without limit). So `reward` is the r_t of the trainer; the ancestor's hidden bonus for resources is not paid.

Source: 1-crafter-event-rewards.md, "consuming event rewards"; DESIGN.md 4.3.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field, ValidationError

from shared_schemas.base import Body, did_you_mean
from shared_schemas.rewards import DecisionRewards, StepRewards
from shared_schemas.trajectory import StepData
from task_app.complaints import invalid, most_telling
from task_app.errors import InvalidRequest

CONSISTENT, PER_ACHIEVEMENT = "consistent", "per_achievement"
STRATEGIES = {
    **dict.fromkeys((CONSISTENT, "simple", "consistent_stepwise", "decision_consistent"), CONSISTENT),
    **dict.fromkeys(
        (PER_ACHIEVEMENT, "complex", "per-achievement", "perachievement", "achievement_weighted"),
        PER_ACHIEVEMENT,
    ),
}


class _Strategy(Body):
    strategy: str = Field(default=CONSISTENT, max_length=100)
    weights: dict[str, float] = Field(default_factory=dict)
    k_limits: dict[str, int] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stepwise:
    """The switches that every route knows, and those of this route alone."""

    switches: StepRewards = field(default_factory=StepRewards)
    strategy: str = CONSISTENT
    weights: Mapping[str, float] = field(default_factory=dict)
    k_limits: Mapping[str, int] = field(default_factory=dict)

    @property
    def active(self) -> bool:
        return self.switches.emits_decision_rewards


def read_stepwise(raw: Any, *, where: str) -> Stepwise:
    """`config.step_rewards` of a legacy request.

    Raises:
        InvalidRequest: an unknown key, value or strategy.
    """
    if not isinstance(raw, dict):
        raise InvalidRequest(f"{where} is no object", where=where)
    own = {name: raw[name] for name in _Strategy.model_fields if raw.get(name) is not None}
    rest = {name: value for name, value in raw.items() if name not in _Strategy.model_fields}
    if rest.get("indicator_lambda", 0.0) is None:
        del rest["indicator_lambda"]
    try:
        extra, switches = _Strategy.model_validate(own), StepRewards.model_validate(rest)
    except ValidationError as exc:
        known = (*StepRewards.model_fields, *_Strategy.model_fields)
        raise invalid(most_telling(exc.errors(include_url=False)), where=where, known=known) from exc
    strategy = STRATEGIES.get(extra.strategy.strip().lower())
    if strategy is None:
        raise InvalidRequest(
            f"unknown strategy {extra.strategy!r}{did_you_mean(extra.strategy, STRATEGIES)}",
            where=f"{where}.strategy",
        )
    return Stepwise(switches, strategy, extra.weights, extra.k_limits)


def stepwise_blocks(steps: Sequence[StepData], rules: Stepwise) -> list[dict[str, Any]]:
    """[T] `info.stepwise` of one episode's decisions; empty when the switches are off."""
    if not rules.active:
        return []
    credited: Counter[str] = Counter()
    return [_block(step, len(steps), rules, credited) for step in steps]


def _block(step: StepData, decisions: int, rules: Stepwise, credited: Counter[str]) -> dict[str, Any]:
    earned = step.metadata.decision_rewards or DecisionRewards(
        turn=step.turn, ach_delta=0, unique_delta=0, all=(), unique=()
    )
    indicator = int(earned.unique_delta > 0)
    names = earned.all if rules.switches.kind == "absolute" else earned.unique
    components = []
    if rules.strategy == PER_ACHIEVEMENT:
        components = _credit(earned.all, rules, credited)
        base = float(sum(part["reward"] for part in components))
    else:
        base = float(len(names))
    bonus = rules.switches.indicator_lambda + rules.switches.step_beta * (decisions - (step.turn - 1))
    block: dict[str, Any] = {
        "decision_index": step.turn,
        "indicator": indicator,
        "new_achievements": list(earned.unique),
        "reward": base + indicator * bonus,
        "strategy": rules.strategy,
        "base_reward": base,
    }
    if rules.strategy == PER_ACHIEVEMENT:
        block |= {
            "components": components,
            "credited_achievements": [part["achievement"] for part in components],
        }
    return block


def _credit(achieved: Sequence[str], rules: Stepwise, credited: Counter[str]) -> list[dict[str, Any]]:
    """What this decision is paid for by name; `credited` counts on through the episode."""
    components = []
    for name in achieved:
        limit = rules.k_limits.get(name, 1)
        if 0 < limit <= credited[name]:
            continue
        credited[name] += 1
        components.append({"achievement": name, "reward": rules.weights.get(name, 1.0)})
    return components


def stepwise_details(
    episodes: Sequence[Sequence[dict[str, Any]]], rules: Stepwise, *, unlocked: Sequence[str]
) -> dict[str, Any]:
    """`metrics.details.stepwise` over all episodes of the rollout.

    Args:
        episodes: the `stepwise_blocks` of each.
        rules: what they were made by.
        unlocked: achievements unlocked when the last episode ended.
    """
    blocks = [block for episode in episodes for block in episode]
    unique = sorted({name for block in blocks for name in block["new_achievements"]})
    return {
        "indicator_sum": sum(block["indicator"] for block in blocks),
        "reward_sum": float(sum(block["reward"] for block in blocks)),
        "resource_reward": 0.0,
        "new_achievements_total": sum(len(block["new_achievements"]) for block in blocks),
        "mode": rules.switches.mode,
        "strategy": rules.strategy,
        "indicator_lambda": rules.switches.indicator_lambda,
        "step_beta": rules.switches.step_beta,
        "weights": dict(rules.weights),
        "k_limits": dict(rules.k_limits),
        "unique_achievements_total": len(unique),
        "unique_achievements": unique,
        "final_achievements": sorted(unlocked),
    }
