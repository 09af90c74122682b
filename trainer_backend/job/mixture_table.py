"""[rollout_only] and [rollout_allocation_schedule] of a job: fixed policies, and when they sample.

Keys and names are from source 4 if it has them (docs/mixture.md).
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
    """The sampling options of training rollouts, which are neither greedy nor close to uniform."""

    temperature: float = Field(
        default=1.0, gt=0.0, le=10.0, description="sampling temperature; that of [rollout] is also trained"
    )


@with_optional(TrainedSamplingKeys, absent="; absent: as in [rollout]")
class FixedPolicyKeys(Table):
    """A frozen model, and how it samples."""

    name: str = Field(default=FIXED, pattern=r"^[A-Za-z0-9._-]+$", max_length=60)
    """name of the policy in metrics, and last part of `model`; no two fixed policies have the same"""
    model_path: Path | None = None
    """a model folder, or a run directory (its best checkpoint, else its newest); without model_path and
    inference_url, the table is inactive"""
    inference_url: str | None = Field(default=None, repr=False)
    """instead of model_path: an OpenAI-compatible server that returns token ids and log-probs"""
    model: str | None = Field(default=None, min_length=1, max_length=500)
    """the model's name at inference_url"""
    # No repr: a key pasted here by mistake must not appear in an error.
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Z_][A-Z0-9_]*$", repr=False)
    """environment variable that holds the key of inference_url"""
    logprobs: Literal["raw", "processed"] | None = None
    """kind of the log-probs from inference_url. raw: of softmax(logits) before temperature and truncation, as
    in vLLM; processed: of the sampling distribution; absent: raw"""


class RolloutOnlyTable(FixedPolicyKeys):
    """[rollout_only], or several as [[rollout_only]]: a frozen model that samples a part of the rollouts."""

    weight: float = Field(default=1.0, gt=0)
    """with several fixed policies: how often this one is chosen, relative to the others' weights"""
    objective: ObjectiveKind = "decoupled"
    """loss of its samples. decoupled: the job's loss, clipped around the proximal policy, times a truncated
    weight; single_ratio: the job's loss, ratio to the fixed policy; reinforce: the weight without a clip"""
    baseline: Baseline = "shared"
    """siblings that its episodes are compared with. shared: all; per_policy: those of the same policy"""
    behaviour_weight_cap: float | None = Field(default=None, ge=1)
    """weight cap of its samples; absent: as in [training]"""
    behaviour_weight_floor: float | None = Field(default=None, ge=0, le=1)
    """weight floor of its samples; absent: as in [training]"""
    behaviour_weight_level: RatioLevel | None = None
    """weight level of its samples; absent: as in [training]"""
    behaviour_weight_mode: WeightMode | None = None
    """weight mode of its samples; absent: as in [training]"""
    train_value_head: bool = False
    """also train the critic on these samples, weighted by their truncated weights"""

    @property
    def is_active(self) -> bool:
        """Whether the table names a model."""
        return self.model_path is not None or self.inference_url is not None

    @property
    def is_remote(self) -> bool:
        """Whether the model runs on a server at `inference_url`."""
        return self.inference_url is not None

    @property
    def source(self) -> str:
        """The model's name for messages."""
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
    """[rollout_allocation_schedule]: alpha, the probability that the actor samples, in each iteration (=
    step).
    """

    boards = ("rollout_allocation_schedule.type",)

    type: str = "constant"
    """course of alpha; each type has its own keys (docs/mixture.md)"""
    alpha: float | None = Field(default=None, ge=0, le=1)
    """constant: the probability that the actor samples"""
    alpha_0: float | None = Field(default=None, ge=0, le=1)
    """linear: alpha at step 0; adaptive: alpha before there are results"""
    beta: float | None = Field(default=None, ge=0)
    """linear: increase of alpha per step"""
    min_alpha: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="adaptive: lower bound of alpha, reached while a fixed policy is as far ahead as it ever "
        f"was and its samples count in full; absent: {MIN_ALPHA:g}",
    )
    max_alpha: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description=f"linear, adaptive: upper bound of alpha; absent: {MAX_ALPHA:g}. Below 1, adaptive "
        "keeps testing fixed policies that it has left",
    )
    gamma: float | None = Field(default=None, ge=0)
    """exponential: alpha = 1 - exp(-gamma * step)"""
    switch_steps: tuple[SwitchStep, ...] = ()
    """step: ascending steps; at each of them the sampling changes between actor and fixed policy"""
    initial_policy: Literal["actor", "fixed"] | None = None
    """step: the policy before the first switch; absent: fixed"""
    window: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description=f"adaptive: number of past iterations that it uses; absent: {WINDOW}",
    )
    unit: MixingUnit = "iteration"
    """what is sampled by one policy: an iteration, a group, or a single rollout"""
    selection: Selection = "weights"
    """choice among several fixed policies: by weight, or by the best outcomes so far (UCB1)"""

    @field_validator("switch_steps")
    @classmethod
    def _rise(cls, steps: tuple[int, ...]) -> tuple[int, ...]:
        for before, after in pairwise(steps):
            if before >= after:
                wrong = "is given twice" if before == after else f"comes after {before}"
                raise ValueError(f"step {after} {wrong}; each comes once, in rising order")
        return steps

    def values(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return the values of the keys that the job sets."""
        own = self.own(self.type)
        found = {key: own.get(key, getattr(self, key, None)) for key in sorted(keys)}
        return {key: value for key, value in found.items() if value not in (None, ())}
