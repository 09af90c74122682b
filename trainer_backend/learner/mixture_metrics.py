"""What an update tells of who sampled: the token check of the actor's samples, and the weights of all."""

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter

import torch

from trainer_backend.core.behaviour import WeightConfig, counted_share, effective_share, truncated
from trainer_backend.core.errors import place
from trainer_backend.core.mixture_history import COUNTED, metric_of
from trainer_backend.core.objective import Objective
from trainer_backend.core.policies import ACTOR
from trainer_backend.errors import SamplerMismatch
from trainer_backend.learner.behaviour import Weighed
from trainer_backend.learner.steps import Scored

# Of the actor these stand as `loss/…` too; told under its name beside those of the fixed policies.
_OF_THE_LOSS = ("clip_low_share", "clip_high_share", "ratio_mean", "entropy")


def mismatch(scored: Sequence[Scored], *, limit: float) -> dict[str, float]:
    """How far the sampler's log-probs are from the learner's own: the token-in, token-out check.

    Of the actor's samples: those of another policy are far away, and should be. Empty where there are none.

    Raises:
        SamplerMismatch: one is further away than `limit` (nats).
    """
    tokens = [
        (abs(own - item.segment.logprobs[position]), own, item.segment, position)
        for item in scored
        if item.policy == ACTOR
        for position, own in zip(item.segment.sampled_positions, item.proximal, strict=True)
    ]
    if not tokens:
        return {}
    gap, own, segment, position = max(tokens, key=itemgetter(0))
    if gap <= limit:
        mean = sum(token[0] for token in tokens) / len(tokens)
        return {"mismatch/logprob_max": gap, "mismatch/logprob_mean": mean}
    beyond = sum(token[0] > limit for token in tokens)
    raise SamplerMismatch(
        f"token {segment.token_ids[position]} was sampled with log-prob {segment.logprobs[position]:.6g}, "
        f"and the learner finds {own:.6g} with the same weights: {gap:.3g} nats apart, more than {limit:g} "
        f"(training.mismatch_limit; beyond it: {beyond} of {len(tokens)} tokens)",
        where=place(segment.rollout_id, segment.decision[position] + 1, position),
        hint="Few tokens beyond it: products may round by more than that; raise it. Many: the engine had "
        "other weights, another temperature or other token ids; look at "
        f"`turnwise inspect {segment.rollout_id} --tokens`.",
    )


def mixture_metrics(
    objectives: Mapping[str, Objective], found: Weighed, metrics: Mapping[str, float]
) -> dict[str, float]:
    """How much the samples of each policy counted; empty for a job without fixed policies.

        actor/importance_sampling           1 where a fixed policy's samples were trained on
        actor/importance_weight_mean        of those: proximal/behaviour before truncation, one for each token
                                            or decision or episode, by its level; std, min, max beside it
        mixture/ess, …/counted_share        of those, truncated: `effective_share`, `counted_share`
        mixture/{policy}/ess, …/counted_share, …/weight_mean
                                            the same of each policy, the actor too; its mean truncated weight
        mixture/{policy}/truncated_share    units whose weight was held at the cap, or became 0; not of
                                            `single_ratio`, whose policy loss has no weight
        mixture/{policy}/lost_mass          of a fixed policy with top_p or top_k: how much of the proximal
                                            policy's probability lies on tokens that it never says, in the
                                            states that it visits: 1 - mean p/mu of a token, an estimate

    Args:
        objectives: by policy.
        found: of the iteration.
        metrics: of its steps; the actor's `loss/…` are told again as `mixture/actor/…`.

    Source: 4-mixture-of-rollout-models.md, "Monitoring and Logging" (names).
    """
    if len(objectives) == 1:
        return {}
    by_policy = {
        policy: truncated(torch.tensor(logs, dtype=torch.float64), objectives[policy].weighting).tolist()
        for policy, logs in found.logs.items()
    }
    fixed = [policy for policy in by_policy if policy != ACTOR]
    told = {"actor/importance_sampling": float(bool(fixed))}
    if fixed:
        told |= _raw_weights([math.exp(log) for policy in fixed for log in found.logs[policy]])
        of_fixed = [weight for policy in fixed for weight in by_policy[policy]]
        told["mixture/ess"] = effective_share(of_fixed)
        told[f"mixture/{COUNTED}"] = counted_share(of_fixed)
    for policy, weights in by_policy.items():
        told |= {
            metric_of(policy, "ess"): effective_share(weights),
            metric_of(policy, COUNTED): counted_share(weights),
            metric_of(policy, "weight_mean"): math.fsum(weights) / len(weights),
        }
        if objectives[policy].kind != "single_ratio":
            cut = _cut_share(found.logs[policy], objectives[policy].weighting)
            told[metric_of(policy, "truncated_share")] = cut
        if objectives[policy].samples_truncated:
            told[metric_of(policy, "lost_mass")] = 1.0 - found.token_means[policy]
    again = {name: metrics.get(f"loss/{name}") for name in _OF_THE_LOSS}
    return told | {metric_of(ACTOR, name): value for name, value in again.items() if value is not None}


def _cut_share(logs: Sequence[float], config: WeightConfig) -> float:
    """How many of the weights are not what they would be without truncation."""
    low = config.floor if config.mode == "mask" else 0.0
    return sum(not low <= math.exp(log) <= config.cap for log in logs) / len(logs)


def _raw_weights(weights: Sequence[float]) -> dict[str, float]:
    mean = math.fsum(weights) / len(weights)
    squares = math.fsum((weight - mean) ** 2 for weight in weights) / len(weights)
    return {
        "actor/importance_weight_mean": mean,
        "actor/importance_weight_std": math.sqrt(squares),
        "actor/importance_weight_min": min(weights),
        "actor/importance_weight_max": max(weights),
    }
