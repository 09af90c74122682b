"""[rollout_only] and [rollout_allocation_schedule] of a job TOML: fixed policies, and who samples when.

Keys and names are those of source 4 where it has them (docs/mixture.md).
"""

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from shared_schemas.trajectory import MOST_TOKENS
from trainer_backend.core.adaptive import MAX_ALPHA, MIN_ALPHA, WINDOW
from trainer_backend.core.behaviour import WeightMode
from trainer_backend.core.losses import RatioLevel
from trainer_backend.core.objective import ObjectiveKind
from trainer_backend.core.policies import ACTOR, FIXED
from trainer_backend.job.addresses import shown
from trainer_backend.job.tables import Table

Baseline = Literal["shared", "per_policy"]
MixingUnit = Literal["iteration", "group", "rollout"]
Selection = Literal["weights", "reward"]
SwitchStep = Annotated[int, Field(ge=1)]


class RolloutOnlyTable(Table):
    """[rollout_only], or several as [[rollout_only]]: a frozen model that samples a part of the rollouts."""

    name: str = Field(
        default=FIXED,
        pattern=r"^[A-Za-z0-9._-]+$",
        max_length=60,
        description="of the policy, in metrics and as last part of `model`; several must differ",
    )
    model_path: Path | None = Field(
        default=None,
        description="a model folder, or a run directory (its best checkpoint, else its newest); without it, "
        "and without inference_url, the table is not active",
    )
    inference_url: str | None = Field(
        default=None,
        description="instead of model_path: an OpenAI-compatible server that returns token ids and log-probs",
    )
    model: str | None = Field(
        default=None, min_length=1, max_length=500, description="its name at inference_url"
    )
    # No repr: what stands here by mistake may be the key itself, which no error may repeat.
    api_key_env: str | None = Field(
        default=None,
        pattern=r"^[A-Z_][A-Z0-9_]*$",
        repr=False,
        description="environment variable that holds the key of inference_url",
    )
    logprobs: Literal["raw", "processed"] | None = Field(
        default=None,
        description="what the log-probs of inference_url are of: raw, softmax(logits) before temperature and "
        "truncation, as vLLM's are; processed, what was sampled from; absent: raw",
    )
    temperature: float | None = Field(
        default=None, gt=0.0, le=10.0, description="of sampling; absent: that of [rollout]"
    )
    top_p: float | None = Field(
        default=None,
        gt=0.0,
        le=1.0,
        description="nucleus; absent: that of [rollout]; below 1 needs rollout.allow_truncated_sampling",
    )
    top_k: int | None = Field(
        default=None,
        ge=0,
        le=MOST_TOKENS,
        description="0 keeps the whole vocabulary; absent: that of [rollout]",
    )
    weight: float = Field(default=1.0, gt=0, description="its share among several fixed policies")
    objective: ObjectiveKind = Field(
        default="decoupled",
        description="of its samples: the job's loss, clipped around the last policy, times a truncated "
        "weight; the ratio to the fixed policy inside the clip, as published; or weights without a clip",
    )
    baseline: Baseline = Field(
        default="shared", description="whether its episodes are compared with all siblings, or its own alone"
    )
    behaviour_weight_cap: float | None = Field(
        default=None, ge=1, description="of its samples; absent: that of [training]"
    )
    behaviour_weight_floor: float | None = Field(default=None, ge=0, le=1, description="likewise")
    behaviour_weight_level: RatioLevel | None = Field(default=None, description="likewise")
    behaviour_weight_mode: WeightMode | None = Field(default=None, description="likewise")
    train_value_head: bool = Field(
        default=False, description="critic: let it learn from these samples too, by their truncated weights"
    )

    @property
    def is_active(self) -> bool:
        """Whether it names a model at all."""
        return self.model_path is not None or self.inference_url is not None

    @property
    def is_remote(self) -> bool:
        """Whether its model answers at somebody else's server."""
        return self.inference_url is not None

    @property
    def source(self) -> str:
        """What it is called where a person reads it."""
        return str(self.model_path or f"{self.model} at {shown(self.inference_url or '')}")

    @field_validator("name")
    @classmethod
    def _is_not_the_actor(cls, name: str) -> str:
        if name == ACTOR:
            raise ValueError(f"{ACTOR!r} is the policy that is trained; give the fixed one another name")
        return name

    @model_validator(mode="after")
    def _one_source(self) -> "RolloutOnlyTable":
        if self.model_path is not None and self.is_remote:
            raise ValueError(f"{self.name!r} has both model_path and inference_url; which of them is it?")
        if self.is_remote and self.model is None:
            raise ValueError(f"{self.name!r}: inference_url needs 'model', its name there")
        for key in () if self.is_remote else ("model", "api_key_env", "logprobs"):
            if getattr(self, key) is not None:
                meant = " Did you mean model_path?" if key == "model" and self.model_path is None else ""
                raise ValueError(f"{self.name!r}: {key!r} is of an inference_url.{meant}")
        return self


class AllocationTable(Table):
    """[rollout_allocation_schedule]: how likely the actor is to sample, alpha, in each iteration (= step)."""

    type: str = Field(default="constant", description="how alpha goes; each reads keys of its own, see below")
    alpha: float | None = Field(
        default=None, ge=0, le=1, description="constant: the probability that the actor samples"
    )
    alpha_0: float | None = Field(
        default=None, ge=0, le=1, description="linear: alpha at step 0; adaptive: before anything is known"
    )
    beta: float | None = Field(default=None, ge=0, description="linear: what alpha gains each step")
    min_alpha: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="adaptive: alpha while a fixed policy is as far ahead as it ever was and its samples "
        f"count in full, and never below; absent: {MIN_ALPHA:g}",
    )
    max_alpha: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description=f"linear, adaptive: alpha never rises above it; absent: {MAX_ALPHA:g}. Below 1, adaptive "
        "looks again at a fixed policy that it has left",
    )
    gamma: float | None = Field(default=None, ge=0, description="exponential: alpha = 1 - exp(-gamma * step)")
    switch_steps: tuple[SwitchStep, ...] = Field(
        default=(), description="step: from each of these on the other policy samples; rising"
    )
    initial_policy: Literal["actor", "fixed"] | None = Field(
        default=None, description="step: who samples before the first of them; absent: fixed"
    )
    window: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description=f"adaptive: iterations that it looks back on; absent: {WINDOW}",
    )
    unit: MixingUnit = Field(
        default="iteration",
        description="what is sampled by one policy: all of an iteration, a group, or each rollout for itself",
    )
    selection: Selection = Field(
        default="weights",
        description="who samples of several fixed policies: by weight, or the one whose outcomes so far "
        "promise most (UCB1)",
    )

    @field_validator("switch_steps")
    @classmethod
    def _rise(cls, steps: tuple[int, ...]) -> tuple[int, ...]:
        for before, after in pairwise(steps):
            if before >= after:
                wrong = "is given twice" if before == after else f"comes after {before}"
                raise ValueError(f"step {after} {wrong}; each comes once, in rising order")
        return steps

    def given(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return the keys that the job sets."""
        return {key: value for key in sorted(keys) if (value := getattr(self, key)) is not None}
