"""What a user's reward function answers, under the names that its library publishes.

Source: 2-rollout-worker-and-gigpo.md, Task 2.1 (the reward function of Phase 1); DESIGN.md 4.3.
"""

from typing import Annotated

from pydantic import AfterValidator, Field

from shared_schemas.base import Body, finite

Finite = Annotated[float, AfterValidator(finite)]
# Strict: True and 2.0 are mistakes, and would pay another step than the function meant.
StepIndex = Annotated[int, Field(strict=True)] | Annotated[str, Field(max_length=200)]


class MetricResult(Body):
    """A figure beside the score, for people; nothing is trained on it."""

    is_score_valid: bool = True
    score: Finite = Field(ge=0.0, le=1.0)
    reason: str = ""


class StepOutput(Body):
    """What the function says of one step: `step_index` is that of the decision, t from 0, or its digits."""

    step_index: StepIndex
    base_reward: Finite
    metrics: dict[str, MetricResult] = Field(default_factory=dict)
    reason: str | None = None


class EvaluateResult(Body):
    """What the function says of one episode. `step_outputs` None: it says nothing of single steps.

    With an `error`, or a score that is not valid, it is no reward: the rollout fails and is asked for anew.
    """

    score: Finite
    is_score_valid: bool = True
    reason: str | None = None
    metrics: dict[str, MetricResult] = Field(default_factory=dict)
    step_outputs: tuple[StepOutput, ...] | None = None
    error: str | None = None
