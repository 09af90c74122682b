"""The result of a user's reward function: types with published names (source 2 of docs/sources.md).

Source: 2-rollout-worker-and-gigpo.md, Task 2.1 (the reward function of Phase 1); DESIGN.md 4.3.
"""

from typing import Annotated

from pydantic import AfterValidator, Field

from shared_schemas.base import Body, finite

Finite = Annotated[float, AfterValidator(finite)]
# Strict, because True and 2.0 are mistakes that would reward a wrong step.
StepIndex = Annotated[int, Field(strict=True)] | Annotated[str, Field(max_length=200)]


class MetricResult(Body):
    """An additional score, which is shown to people and affects no reward."""

    is_score_valid: bool = True
    score: Finite = Field(ge=0.0, le=1.0)
    reason: str = ""


class StepOutput(Body):
    """The reward of one decision; `step_index` is the decision index t from 0, as an integer or as digits."""

    step_index: StepIndex
    base_reward: Finite
    metrics: dict[str, MetricResult] = Field(default_factory=dict)
    reason: str | None = None


class EvaluateResult(Body):
    """The result for one episode, optionally with results for single steps (`step_outputs`).

    If `error` is set or `is_score_valid` is false, the rollout fails and is retried.
    """

    score: Finite
    is_score_valid: bool = True
    reason: str | None = None
    metrics: dict[str, MetricResult] = Field(default_factory=dict)
    step_outputs: tuple[StepOutput, ...] | None = None
    error: str | None = None
