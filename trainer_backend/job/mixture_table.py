"""The tables [rollout_only] and [rollout_allocation_schedule] of a job: fixed policies, and when they sample.

Keys and names that source 4 defines are used unchanged (docs/mixture.md).
"""

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from shared_schemas.base import with_optional
from shared_schemas.trajectory import SamplingKeys
from trainer_backend.core.adaptive import MAX_ALPHA, MIN_ALPHA, WINDOW
from trainer_backend.core.behaviour import WeightMode
from trainer_backend.core.keys import Table
from trainer_backend.core.losses import RatioLevel
from trainer_backend.core.objective import ObjectiveKind
from trainer_backend.core.policies import ACTOR, FIXED
from trainer_backend.job.addresses import checked_url, shown
from trainer_backend.job.plug_table import PlugTable

Baseline = Literal["shared", "per_policy"]
MixingUnit = Literal["iteration", "group", "rollout"]
Selection = Literal["weights", "reward"]
SwitchStep = Annotated[int, Field(ge=1)]


class TrainedSamplingKeys(SamplingKeys):
    """Sampling options of training rollouts. The bounds exclude greedy and nearly uniform sampling."""

    temperature: float = Field(
        default=1.0, gt=0.0, le=10.0, description="sampling temperature; training uses that of [rollout]"
    )


@with_optional(TrainedSamplingKeys, absent="; absent: as in [rollout]")
class FixedPolicyKeys(Table):
    """A model that is never trained, and its sampling options."""

    name: str = Field(default=FIXED, pattern=r"^[A-Za-z0-9._-]+$", max_length=60)
    """name of this policy in metrics, and last part of `model` in stored rollouts. Each fixed policy needs a
    name of its own"""
    model_path: Path | None = None
    """a model folder or a run directory. In a run directory, the best checkpoint is used, or the newest if
    none is marked as best. A table with neither model_path nor inference_url is inactive"""
    inference_url: str | None = Field(default=None, repr=False)
    """instead of model_path: URL of an OpenAI-compatible server that returns token ids and log-probs"""
    model: str | None = Field(default=None, min_length=1, max_length=500)
    """name of the model at the server of inference_url"""
    # No repr: a key pasted here by mistake must not appear in an error.
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Z_][A-Z0-9_]*$", repr=False)
    """name of the environment variable that contains the API key for inference_url"""
    logprobs: Literal["raw", "processed"] | None = None
    """which log-probs the server of inference_url returns. raw: those of softmax(logits), before temperature
    and truncation, as vLLM does; processed: those of the distribution that it samples from; absent: raw"""


class RolloutOnlyTable(FixedPolicyKeys):
    """[rollout_only], or one [[rollout_only]] of several: a fixed policy and the training on its samples."""

    weight: float = Field(default=1.0, gt=0)
    """with several fixed policies: how often this policy is chosen, in proportion to the weights of the
    others"""
    objective: ObjectiveKind = "decoupled"
    """loss for the samples of this policy (docs/mixture.md). decoupled: the job's loss with the ratio to the
    policy before the update, times a truncated importance weight; single_ratio: the job's loss with the ratio
    to the fixed policy, without a weight; reinforce: the policy gradient times a truncated importance weight,
    without a clip"""
    baseline: Baseline = "shared"
    """siblings with which an estimator compares the episodes of this policy. shared: all siblings;
    per_policy: only those that this policy played"""
    behaviour_weight_cap: float | None = Field(default=None, ge=1)
    """behaviour_weight_cap for the samples of this policy; absent: that of [training]"""
    behaviour_weight_floor: float | None = Field(default=None, ge=0, le=1)
    """behaviour_weight_floor for the samples of this policy; absent: that of [training]"""
    behaviour_weight_level: RatioLevel | None = None
    """behaviour_weight_level for the samples of this policy; absent: that of [training]"""
    behaviour_weight_mode: WeightMode | None = None
    """behaviour_weight_mode for the samples of this policy; absent: that of [training]"""
    train_value_head: bool = False
    """also train the critic on the samples of this policy, weighted by their truncated importance weights"""

    @property
    def is_active(self) -> bool:
        """Whether the table names a model. An inactive table has no effect on the run."""
        return self.model_path is not None or self.inference_url is not None

    @property
    def is_remote(self) -> bool:
        """Whether the model runs on a server at `inference_url`."""
        return self.inference_url is not None

    @property
    def source(self) -> str:
        """A name of the model for messages: its folder, or its name and server."""
        return str(self.model_path or f"{self.model} at {shown(self.inference_url or '')}")

    @field_validator("name")
    @classmethod
    def _is_not_the_actor(cls, name: str) -> str:
        if name == ACTOR:
            raise ValueError(f"{ACTOR!r} is the policy that is trained; give the fixed one another name")
        return name

    @field_validator("inference_url")
    @classmethod
    def _is_an_address(cls, url: str | None) -> str | None:
        if url is not None:
            checked_url(url, "inference_url")
        return url


class AllocationTable(PlugTable):
    """[rollout_allocation_schedule]: decides whether the actor or a fixed policy samples.

    The actor samples with probability alpha, which may change in each iteration (a step of the schedule).
    """

    boards = ("rollout_allocation_schedule.type",)

    type: str = "constant"
    """how alpha, the probability that the actor samples, changes from step to step; a step is an iteration.
    A key that only some types read has a meaning that begins with these types (docs/mixture.md)"""
    alpha: float | None = Field(default=None, ge=0, le=1)
    """constant: the probability that the actor samples"""
    alpha_0: float | None = Field(default=None, ge=0, le=1)
    """linear: alpha at step 0, before the first iteration; adaptive: alpha until outcomes of both the actor
    and fixed policies are known"""
    beta: float | None = Field(default=None, ge=0)
    """linear: increase of alpha per step"""
    min_alpha: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="adaptive: lower bound of alpha, which has this value while the lead of the fixed "
        f"policies is as large as ever before and their samples count in full; absent: {MIN_ALPHA:g}",
    )
    max_alpha: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description=f"linear, adaptive: upper bound of alpha; absent: {MAX_ALPHA:g}. If it is below 1, "
        "adaptive still tests fixed policies that are no better than the actor",
    )
    gamma: float | None = Field(default=None, ge=0)
    """exponential: alpha = 1 - exp(-gamma * step)"""
    switch_steps: tuple[SwitchStep, ...] = ()
    """step: the steps, in ascending order, at which sampling changes between the actor and fixed policies"""
    initial_policy: Literal["actor", "fixed"] | None = None
    """step: who samples before the first of switch_steps; absent: fixed"""
    window: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description=f"adaptive: number of past iterations over which it takes means; absent: {WINDOW}",
    )
    unit: MixingUnit = "iteration"
    """the part for which one policy is drawn: an iteration, a group, or a single rollout"""
    selection: Selection = "weights"
    """how one of several fixed policies is chosen. weights: at random, in proportion to `weight`; reward: by
    the outcomes of their episodes so far (UCB1)"""

    @field_validator("switch_steps")
    @classmethod
    def _rise(cls, steps: tuple[int, ...]) -> tuple[int, ...]:
        for before, after in pairwise(steps):
            if before >= after:
                wrong = "is given twice" if before == after else f"comes after {before}"
                raise ValueError(f"step {after} {wrong}; each comes once, in rising order")
        return steps

    def values(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return those of these keys that the job sets, with their values."""
        own = self.own(self.type)
        found = {key: own.get(key, getattr(self, key, None)) for key in sorted(keys)}
        return {key: value for key, value in found.items() if value not in (None, ())}
