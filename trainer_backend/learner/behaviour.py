"""Who sampled what an update trains on: objectives and weights by policy, and what is told of each.

A job without fixed policies has one objective, the actor's, for all of its tokens; the numbers are then those
that they would be if nobody had heard of policies.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TypeVar

import torch
from torch import Tensor

from trainer_backend.core.behaviour import WeightConfig, log_weights, truncated
from trainer_backend.core.errors import place
from trainer_backend.core.losses import LossConfig
from trainer_backend.core.objective import Objective
from trainer_backend.core.policies import ACTOR
from trainer_backend.core.segments import Segment
from trainer_backend.core.units import units_of
from trainer_backend.errors import NonFiniteLoss
from trainer_backend.jobfile.mixture_table import RolloutOnlyTable
from trainer_backend.jobfile.schema import JobConfig
from trainer_backend.jobfile.training_table import TrainingTable
from trainer_backend.learner.steps import Scored
from trainer_backend.plugins import policy_loss

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Weighed:
    """Segments as stop 8 left them.

    scored: in the order given.
    logs: of each policy that sampled some, the log of each unit's weight before truncation.
    token_means: of each, the mean of proximal/behaviour over its tokens, whatever the unit is.
    """

    scored: list[Scored]
    logs: dict[str, list[float]]
    token_means: dict[str, float]


def objectives_of(job: JobConfig) -> dict[str, Objective]:
    """What each policy's samples are trained by: the actor's first, then those of [rollout_only]."""
    table, plug = job.training, policy_loss(job.algorithm.loss)
    clip = LossConfig(clip_low=table.clip_low, clip_high=table.clip_high, clip_dual=table.clip_dual)
    own = Objective("decoupled", plug.compute, clip, job.algorithm.ratio_level, _own_weighting(table))
    fixed = {
        given.name: replace(
            own,
            kind=given.objective,
            weighting=_weighting(table, given),
            trains_head=given.train_value_head,
            samples_truncated=job.sampling_of(given).is_truncated,
        )
        for given in job.fixed_policies
    }
    return {ACTOR: own, **fixed}


def _own_weighting(table: TrainingTable) -> WeightConfig:
    return WeightConfig(
        cap=table.behaviour_weight_cap,
        level=table.behaviour_weight_level,
        mode=table.behaviour_weight_mode,
        floor=table.behaviour_weight_floor,
    )


def _weighting(table: TrainingTable, given: RolloutOnlyTable) -> WeightConfig:
    """That of [training], but for what the fixed policy has for itself."""
    own = _own_weighting(table)
    return WeightConfig(
        cap=_or(given.behaviour_weight_cap, own.cap),
        level=_or(given.behaviour_weight_level, own.level),
        mode=_or(given.behaviour_weight_mode, own.mode),
        floor=_or(given.behaviour_weight_floor, own.floor),
    )


def _or(given: Value | None, inherited: Value) -> Value:
    return inherited if given is None else given


def weighed(
    segments: Sequence[Segment],
    proximal: Sequence[Sequence[float]],
    policies: Sequence[str],
    objectives: Mapping[str, Objective],
    reference: Sequence[Sequence[float]] | None = None,
) -> Weighed:
    """The weight of every sampled token, from all segments of an iteration: steps may part an episode.

    Args:
        segments: all of the iteration.
        proximal: for each, [N] the learner's own log-probs.
        policies: for each, who sampled it.
        objectives: by policy.
        reference: for each, [N] log-probs of what a KL term pulls towards; None: there is no such term.

    Raises:
        NonFiniteLoss: a log-prob is not finite, by the name of its token.
    """
    for segment, own in zip(segments, proximal, strict=True):
        _refuse_non_finite(segment, own, "the learner's log-prob")
        _refuse_non_finite(segment, _sampled(segment), "the sampler's log-prob")
    for segment, other in zip(segments, reference or (), strict=reference is not None):
        _refuse_non_finite(segment, other, "the reference's log-prob")
    rows: dict[int, list[float]] = {}
    logs: dict[str, list[float]] = {}
    token_means: dict[str, float] = {}
    for policy in dict.fromkeys(policies):
        mine = [index for index, name in enumerate(policies) if name == policy]
        of_mine = [segments[index] for index in mine]
        config = objectives[policy].weighting
        units = None if config.level == "token" else units_of(of_mine, [config.level] * len(mine))
        columns_N = _column(proximal[index] for index in mine), _column(map(_sampled, of_mine))
        logs_N = log_weights(
            *columns_N, None if units is None else torch.tensor(list(chain.from_iterable(units)))
        )
        token_means[policy] = log_weights(*columns_N, None).double().exp().mean().item()
        weights = iter(truncated(logs_N, config).tolist())
        rows |= {
            index: list(islice(weights, len(part.sampled_positions)))
            for index, part in zip(mine, of_mine, strict=True)
        }
        logs[policy] = _one_each(logs_N, units)
    columns = zip(segments, proximal, policies, strict=True)
    scored = [
        Scored(part, list(own), rows[i], name, reference=None if reference is None else list(reference[i]))
        for i, (part, own, name) in enumerate(columns)
    ]
    return Weighed(scored, logs, token_means)


def _column(rows: Iterable[Sequence[float]]) -> Tensor:
    return torch.tensor(list(chain.from_iterable(rows)), dtype=torch.float32)


def _sampled(segment: Segment) -> list[float]:
    """[N] the sampler's log-probs."""
    return [segment.logprobs[position] for position in segment.sampled_positions]


def _one_each(logs_N: Tensor, units: Sequence[Sequence[int]] | None) -> list[float]:
    found = logs_N.tolist()
    if units is None:
        return found
    return list(dict(zip(chain.from_iterable(units), found, strict=True)).values())


def _refuse_non_finite(segment: Segment, values: Sequence[float], what: str) -> None:
    """Name the token whose log-prob is not finite."""
    if all(map(math.isfinite, values)):
        return  # as a rule, and the walk below takes ten times as long
    for position, value in zip(segment.sampled_positions, values, strict=True):
        if not math.isfinite(value):
            where = place(segment.rollout_id, segment.decision[position] + 1)
            raise NonFiniteLoss(f"{where}, token {position}: {what} is {value}")
