"""Objectives, behaviour weights and metrics for each policy that sampled tokens of an update.

These policies are the actor and, if the job has any, fixed policies, which are not trained themselves. A
behaviour weight is the probability ratio proximal/behaviour of a token, a decision or an episode, truncated.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared_schemas.trajectory import Sampling
from trainer_backend.core.aggregation import number_units
from trainer_backend.core.behaviour import WeightKeys, counted_share, effective_share, log_weights, truncated
from trainer_backend.core.collate import Batch, split_by_number
from trainer_backend.core.columns import Row
from trainer_backend.core.mixture_history import COUNTED, metric_name
from trainer_backend.core.objective import Objective
from trainer_backend.core.policies import ACTOR
from trainer_backend.errors import NonFiniteLoss, SamplerMismatch, place
from trainer_backend.job.mixture_table import RolloutOnlyTable
from trainer_backend.job.training_table import AlgorithmTable, TrainingTable
from trainer_backend.learner.stepping import Scored
from trainer_backend.plugins import policy_loss


@dataclass(frozen=True, slots=True)
class Weighed:
    """Segments with the learner's log-probs and with behaviour weights (stop 8 of docs/route.md)."""

    scored: list[Scored]
    """All segments, in the order of the `drafts` that `weighed` received."""
    logs: dict[str, NDArray[Any]]
    """For each policy, by name: the logarithm of each unit's behaviour weight before truncation. A unit is
    a token, a decision or an episode."""
    token_means: dict[str, float]
    """For each policy, by name: the mean of the tokens' own probability ratios proximal/behaviour, whatever
    the policy's unit is."""


def build_objectives(
    training: TrainingTable,
    algorithm: AlgorithmTable,
    fixed: Sequence[tuple[RolloutOnlyTable, Sampling]] = (),
) -> dict[str, Objective]:
    """Build the training objective for the samples of each policy: the actor, then each fixed policy.

    The result is keyed by the name of the policy.
    """
    plug = policy_loss(algorithm.loss)
    keys = training.read(plug.keys, algorithm.loss)
    actors = Objective(
        kind="decoupled",
        loss=plug.compute
        if keys is training
        else lambda new, old, advantages, weights, _: plug.compute(new, old, advantages, weights, keys),
        clip=training,
        ratio_level=algorithm.ratio_level,
        weighting=training,
    )
    weight_keys = set(WeightKeys.model_fields)
    objectives = {ACTOR: actors}
    for table, sampling in fixed:
        own = table.model_dump(include=weight_keys, exclude_none=True)
        objectives[table.name] = replace(
            actors,
            kind=table.objective,
            weighting=WeightKeys(**training.model_dump(include=weight_keys) | own),
            trains_head=table.train_value_head,
            samples_truncated=sampling.is_truncated,
        )
    return objectives


def weighed(
    drafts: Sequence[Scored], proximal: Sequence[Row], objectives: Mapping[str, Objective]
) -> Weighed:
    """Add the learner's log-probs and the behaviour weights to the segments of an iteration or a micro-batch.

    Args:
        drafts: the segments. Of their scores, only the log-probs under the reference policy are set.
        proximal: for each segment, the [N] log-probs of its sampled tokens under the learner's weights.
        objectives: the objective of each policy, by its name.

    Raises:
        NonFiniteLoss: a log-prob is not finite.
    """
    for draft, own in zip(drafts, proximal, strict=True):
        reference = () if draft.reference is None else draft.reference
        rows = {"learner": own, "sampler": draft.segment.logprobs, "reference": reference}
        for whose, values in rows.items():
            draft.segment.refuse_non_finite(values, f"the {whose}'s log-prob", NonFiniteLoss)
    weights: dict[int, NDArray[Any]] = {}
    logs: dict[str, NDArray[Any]] = {}
    token_means: dict[str, float] = {}
    for policy in dict.fromkeys(draft.policy for draft in drafts):
        mine = [index for index, draft in enumerate(drafts) if draft.policy == policy]
        segments = [drafts[index].segment for index in mine]
        keys = objectives[policy].weighting
        level = keys.behaviour_weight_level
        units = None if level == "token" else number_units(segments, [level] * len(mine))
        unit_N = None if units is None else torch.from_numpy(np.concatenate(units))
        columns_N = (
            _column([proximal[index] for index in mine]),
            _column([part.logprobs for part in segments]),
        )
        logs_N = log_weights(*columns_N, unit_N)
        token_means[policy] = log_weights(*columns_N, None).double().exp().mean().item()
        ends = np.cumsum([len(part.logprobs) for part in segments])
        weights |= zip(mine, np.split(truncated(logs_N, keys).numpy(), ends[:-1]), strict=True)
        if unit_N is not None:  # keep one logarithm per unit; units are numbered from 0
            logs_N = logs_N.new_empty(int(unit_N.max()) + 1).index_put((unit_N,), logs_N)
        logs[policy] = logs_N.numpy()
    pairs = enumerate(zip(drafts, proximal, strict=True))
    scored = [replace(draft, proximal=own, behaviour=weights[index]) for index, (draft, own) in pairs]
    return Weighed(scored, logs, token_means)


class FirstStep:
    """Scores the segments of an iteration's first optimizer step by the forward passes of that step.

    Before this step the learner's weights are those of the proximal policy, so a separate scoring pass would
    compute the same log-probs. This requires that there is no dropout, and that all tokens that share a ratio
    or a behaviour weight lie in the same micro-batch.
    """

    def __init__(self, drafts: Sequence[Scored], objectives: Mapping[str, Objective]) -> None:
        self.drafts, self._objectives = drafts, objectives  # in the order of the step
        # [N] log-probs of each segment of the micro-batches so far, by the segment's index in the step.
        self.proximal: dict[int, NDArray[Any]] = {}

    def scored(self, piece: Batch, logprobs_N: Tensor) -> Batch:
        """Return a micro-batch with proximal log-probs and the behaviour weights that follow from them.

        `logprobs_N` are the log-probs that the micro-batch's own forward pass computed. `piece` and
        `logprobs_N` must be on the CPU.
        """
        own_N = logprobs_N.detach()
        rows = split_by_number(piece.packed, own_N)
        self.proximal |= rows
        samples = weighed([self.drafts[index] for index in rows], list(rows.values()), self._objectives)
        weights_N = _column([item.behaviour for item in samples.scored])
        return replace(piece, proximal_logprob_N=own_N, behaviour_weight_N=weights_N)


class Scores:
    """The proximal log-probs and behaviour weights of an iteration's segments.

    They are computed before the first optimizer step, or, for the segments of this step, by its own forward
    passes (`FirstStep`). A segment's number is its index in `drafts`.

    Args:
        proximal: for each segment that is already scored, its [N] log-probs, by the segment's number.
        members: the numbers of the segments in `first`.
        first: the segments that the first step scores itself; None: all segments are already scored.
    """

    def __init__(
        self,
        drafts: Sequence[Scored],
        proximal: Mapping[int, Row],
        objectives: Mapping[str, Objective],
        *,
        members: Sequence[int] = (),
        first: FirstStep | None = None,
    ) -> None:
        self._drafts, self._proximal, self._objectives = drafts, proximal, objectives
        self._members, self.first = members, first

    def step(self, members: Sequence[int]) -> Sequence[Scored]:
        """Return the segments of an optimizer step, whose numbers are `members`.

        While `first` is set, the step must be the first one. Its segments are returned without scores.
        """
        if self.first is not None:
            return self.first.drafts
        return [self.samples.scored[number] for number in members]

    @cached_property
    def samples(self) -> Weighed:
        """All segments with behaviour weights. If `first` is set, the first step must be over."""
        if self.first is not None:
            rows = {self._members[index]: row for index, row in self.first.proximal.items()}
            self._proximal, self.first = {**self._proximal, **rows}, None
        rows_of_all = [self._proximal[number] for number in range(len(self._drafts))]
        return weighed(self._drafts, rows_of_all, self._objectives)


def _column(rows: Sequence[Row]) -> Tensor:
    return torch.from_numpy(np.concatenate(rows)).float()


# Names of the actor's metrics `loss/…` that are reported as `mixture/actor/…` too.
_OF_THE_LOSS = ("clip_low_share", "clip_high_share", "ratio_mean", "entropy")


def mismatch(scored: Sequence[Scored], policy_version: int | None, *, limit: float) -> dict[str, float]:
    """Check that the sampler and the learner compute the same log-probs for tokens that the actor sampled.

    With `policy_version`, only tokens that this version sampled are compared, because other versions have
    other weights. With None, all tokens of the actor are compared.

    Returns:
        mismatch/logprob_max, mismatch/logprob_mean    the absolute differences in nats; missing if there is
                                                       no token to compare
        mismatch/checked_share                         share of the actor's tokens that were compared; only
                                                       with `policy_version`

    Raises:
        SamplerMismatch: a difference is greater than `limit`.
    """
    of_actor = [item for item in scored if item.policy == ACTOR]
    sampled = sum(len(item.proximal) for item in of_actor)
    if not sampled:
        return {}
    gaps = [np.abs(np.asarray(item.proximal, np.float64) - item.segment.logprobs) for item in of_actor]
    if policy_version is not None:  # -1 marks tokens that are not compared
        versions = [item.segment.versions for item in of_actor]
        gaps = [np.where(own == policy_version, gap, -1.0) for own, gap in zip(versions, gaps, strict=True)]
    gap_N = np.concatenate(gaps)
    gap_N = gap_N[gap_N >= 0.0]
    share = {} if policy_version is None else {"mismatch/checked_share": len(gap_N) / sampled}
    if not len(gap_N):
        return share
    gap = float(gap_N.max())
    if gap <= limit:
        mean = sum(gap_N.tolist()) / len(gap_N)
        return {"mismatch/logprob_max": gap, "mismatch/logprob_mean": mean, **share}
    beyond = int((gap_N > limit).sum())
    item, row = next(pair for pair in zip(of_actor, gaps, strict=True) if gap in pair[1])
    segment, n = item.segment, int(row.argmax())
    own, position = item.proximal[n], int(segment.sampled_positions[n])
    error = SamplerMismatch(
        f"token {segment.token_ids[position]} was sampled with log-prob {segment.logprobs[n]:.6g}, "
        f"and the learner finds {own:.6g} with the same weights: {gap:.3g} nats apart, more than {limit:g} "
        f"(training.mismatch_limit; beyond it: {beyond} of {len(gap_N)} tokens)",
        where=place(segment.rollout_id, int(segment.decision[n]) + 1, position),
        hint="If few tokens are beyond it, rounding is the likely cause; raise the limit. If many are, the "
        "engine had other weights, another temperature or other token ids; look at "
        f"`turnwise inspect {segment.rollout_id} --tokens`.",
    )
    wrong = [pair[0].segment.rollout_id for pair in zip(of_actor, gaps, strict=True) if pair[1].max() > limit]
    error.rollout_ids = tuple(dict.fromkeys(wrong))
    raise error


def mixture_metrics(
    objectives: Mapping[str, Objective], samples: Weighed, metrics: Mapping[str, float]
) -> dict[str, float]:
    """Compute metrics of how much the samples of each policy contributed to an update.

    The result is empty for a job without fixed policies. A unit is a token, a decision or an episode. Its
    weight is the probability ratio proximal/behaviour.

        actor/importance_sampling           1 if the update trained on samples of a fixed policy, else 0
        actor/importance_weight_mean        mean weight of the fixed policies' units before truncation; also
                                            …_std, …_min and …_max
        mixture/ess, …/counted_share        `effective_share` and `counted_share` of the truncated weights of
                                            the fixed policies' units
        mixture/{policy}/ess, …/counted_share
                                            the same for the units of one policy, which may be the actor
        mixture/{policy}/weight_mean        mean truncated weight
        mixture/{policy}/truncated_share    share of units whose weight was capped or set to 0; not reported
                                            for the objective `single_ratio`, whose loss has no weight
        mixture/{policy}/lost_mass          for a fixed policy that samples with top-k or top-p: the
                                            probability, under the proximal policy, of tokens that the fixed
                                            policy cannot sample; estimated as 1 - mean proximal/behaviour
                                            over tokens

    `metrics` are the metrics of the optimizer steps. Some of the actor's `loss/…` metrics are returned too,
    under the names `mixture/actor/…`.

    Source: 4-mixture-of-rollout-models.md, "Monitoring and Logging" (names).
    """
    if len(objectives) == 1:
        return {}
    logs = {policy: row.tolist() for policy, row in samples.logs.items()}
    by_policy = {
        policy: truncated(torch.from_numpy(row).double(), objectives[policy].weighting).tolist()
        for policy, row in samples.logs.items()
    }
    fixed = [policy for policy in by_policy if policy != ACTOR]
    figures = {"actor/importance_sampling": float(bool(fixed))}
    if fixed:
        figures |= _raw_weights([math.exp(log) for policy in fixed for log in logs[policy]])
        of_fixed = [weight for policy in fixed for weight in by_policy[policy]]
        figures["mixture/ess"] = effective_share(of_fixed)
        figures[f"mixture/{COUNTED}"] = counted_share(of_fixed)
    for policy, weights in by_policy.items():
        figures |= {
            metric_name(policy, "ess"): effective_share(weights),
            metric_name(policy, COUNTED): counted_share(weights),
            metric_name(policy, "weight_mean"): math.fsum(weights) / len(weights),
        }
        if objectives[policy].kind != "single_ratio":
            keys = objectives[policy].weighting
            low = keys.behaviour_weight_floor if keys.behaviour_weight_mode == "mask" else 0.0
            cut = sum(not low <= math.exp(log) <= keys.behaviour_weight_cap for log in logs[policy])
            figures[metric_name(policy, "truncated_share")] = cut / len(logs[policy])
        if objectives[policy].samples_truncated:
            figures[metric_name(policy, "lost_mass")] = 1.0 - samples.token_means[policy]
    again = {name: metrics.get(f"loss/{name}") for name in _OF_THE_LOSS}
    return figures | {metric_name(ACTOR, name): value for name, value in again.items() if value is not None}


def _raw_weights(weights: Sequence[float]) -> dict[str, float]:
    mean = math.fsum(weights) / len(weights)
    squares = math.fsum((weight - mean) ** 2 for weight in weights) / len(weights)
    return {
        "actor/importance_weight_mean": mean,
        "actor/importance_weight_std": math.sqrt(squares),
        "actor/importance_weight_min": min(weights),
        "actor/importance_weight_max": max(weights),
    }
