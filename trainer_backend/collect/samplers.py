"""Who samples a rollout, and what its policy is told of server and sampling. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import SecretStr

from shared_schemas.rollouts import RolloutRequest
from shared_schemas.trajectory import Sampling
from trainer_backend.core.allocation import DrawnSchedule
from trainer_backend.core.mixture_history import Past
from trainer_backend.core.policies import ACTOR, policy_of
from trainer_backend.core.selection import ByReward, Selection, Weighted
from trainer_backend.jobfile.mixture_table import AllocationTable, MixingUnit, RolloutOnlyTable
from trainer_backend.jobfile.multi_turn_table import MultiTurnTable
from trainer_backend.plugins import allocation


@dataclass(frozen=True, slots=True)
class Inference:
    """Where a language-model policy asks, under which model name, with which key, if it needs one.

    Attributes:
        max_model_len: what the server's prompts and responses may have together, in tokens; None: not known.
        asks: more of the policy's config, for a server that is asked in another way than a gateway for its
            actor; `rollout.policy_config` goes over it.
    """

    url: str
    model: str
    key: SecretStr | None
    max_model_len: int | None = None
    asks: Mapping[str, Any] = field(default_factory=dict)


def model_config(
    table: MultiTurnTable, inference: Inference, sampling: Sampling, *, seed: int
) -> dict[str, Any]:
    """The config of a policy that asks a model."""
    return {
        "inference_url": inference.url,
        "model": inference.model,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
        **({"max_model_length": min(_lengths(table, inference))} if table.enable else {}),
        **inference.asks,
        "seed": seed,
    }


def _lengths(table: MultiTurnTable, inference: Inference) -> list[int]:
    """That bound prompt and response; the model plans with the lower one, where it may ask."""
    found = (table.max_model_length, inference.max_model_len)
    return [length for length in found if length is not None]


def sampler_of(request: RolloutRequest) -> str:
    """The policy that a request is to be sampled by."""
    return policy_of(request.policy.config.get("model"))


def schedule_of(
    table: AllocationTable | None,
    active: Sequence[RolloutOnlyTable],
    *,
    seed: int,
    history: Sequence[Past] = (),
) -> DrawnSchedule | None:
    """The schedule of a job; None where it has no fixed policy, and so no choice.

    Args:
        active: its fixed policies.
        seed: of the job.
        history: iterations that are over, for what looks back on them.
    """
    if table is None or not active:
        return None
    plug = allocation(table.type)
    keys = table.given(plug.needs | plug.takes)
    selection: Selection = Weighted({item.name: item.weight for item in active})
    if table.selection == "reward":
        selection = ByReward([item.name for item in active], history)
    return plug.schedule(keys, seed=seed, selection=selection, history=history)


def looks_back(table: AllocationTable | None) -> bool:
    """Whether its choices depend on what earlier iterations told."""
    return table is not None and (allocation(table.type).looks_back or table.selection == "reward")


def samplers(
    schedule: DrawnSchedule | None,
    unit: MixingUnit,
    stage: str,
    iteration: int,
    *,
    groups: int,
    siblings: int,
) -> list[list[str]]:
    """[groups][siblings] who samples each rollout of a stage of an iteration, by the job's mixing unit.

    All of an iteration includes its refills; otherwise each group, or rollout, of a refill draws for itself.

    Args:
        schedule: None: the actor samples all.
        siblings: the first ones of each group.
    """
    if schedule is None:
        return [[ACTOR] * siblings for _ in range(groups)]
    if unit == "iteration":
        return [[schedule.get_policy_choice(iteration)] * siblings] * groups
    if unit == "group":
        chosen = schedule.choices(iteration, [(stage, group) for group in range(groups)])
        return [[policy] * siblings for policy in chosen]
    chosen = schedule.choices(
        iteration, [(stage, group, sibling) for group in range(groups) for sibling in range(siblings)]
    )
    return [chosen[group * siblings : (group + 1) * siblings] for group in range(groups)]
