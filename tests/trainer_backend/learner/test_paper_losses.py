"""Every loss under every aggregation against its paper: its formula, differentiated in float64."""

from itertools import product

import pytest
import torch

from tests.trainer_backend.learner.hand_made import make_config
from tests.trainer_backend.segment_columns import make_batch
from trainer_backend.core.segments import Segment
from trainer_backend.learner.policy_terms import PolicyTerms
from trainer_backend.plugins import AGGREGATIONS, LOSSES

# episode -> its decisions: advantage, and how far each of its tokens has moved (nats)
PLAYED = {
    "a": [(1.0, [0.02, -0.01, 0.3]), (-0.5, [-0.4])],
    "b": [(-2.0, [0.5, 0.1]), (0.75, [2.0, -0.2]), (1.5, [-0.0001, 0.0002])],
    "c": [(0.25, [0.0, 0.0, 0.1, -0.3])],
}
DECISIONS = [(name, t) for name, rows in PLAYED.items() for t in range(len(rows))]
OLD = -1.5
PLANNED = 100.0


def told_weight(aggregation, name, t):
    """Of a token of decision t, by what the aggregation's name says."""
    tokens = len(PLAYED[name][t][1])
    of_episode = sum(len(moved) for _, moved in PLAYED[name])
    return {
        "token_mean": 1 / 14,
        "decision_mean": 1 / (6 * tokens),
        "episode_equal": 1 / (3 * of_episode),
        "constant": 1 / PLANNED,
    }[aggregation]


def paper_term(loss, log_probs, advantage):
    """What each token of a decision adds to the objective, before it is weighed."""
    ratios = (log_probs - OLD).exp()
    if loss == "policy_gradient":  # Williams 1992
        return advantage * log_probs
    if loss == "cispo":  # arXiv:2506.13585 eq. 4: the weight is held above alone
        return ratios.detach().clamp(max=5.0) * advantage * log_probs
    if loss == "sapo":  # arXiv:2511.20347 eq. 5 and 6
        tau = 1.0 if advantage > 0 else 1.05
        return 4 / tau / (1 + (-tau * (ratios - 1)).exp()) * advantage
    low, high = {"gspo": (3e-4, 4e-4), "dapo": (0.2, 0.28)}.get(loss, (0.2, 0.25))
    if loss == "gspo":  # arXiv:2507.18071 eq. 5 and 7: one ratio, the geometric mean of the sequence's
        ratios = ratios.log().mean().exp().expand(len(log_probs))
    return torch.minimum(ratios * advantage, ratios.clamp(1 - low, 1 + high) * advantage)  # PPO, eq. 7


def paper_gradient(loss, aggregation):
    log_probs = [
        torch.tensor([OLD + d for d in PLAYED[name][t][1]], dtype=torch.float64, requires_grad=True)
        for name, t in DECISIONS
    ]
    terms = [
        told_weight(aggregation, name, t) * paper_term(loss, row, PLAYED[name][t][0]).sum()
        for row, (name, t) in zip(log_probs, DECISIONS, strict=True)
    ]
    (-sum(terms)).backward()
    return torch.cat([row.grad for row in log_probs])


def segment(name, t, tokens):
    n = 1 + tokens
    return Segment.of(name, (1,) * n, (0.0,) * tokens, [(1, n, t, 0, 1.0)])


@pytest.mark.parametrize(("loss", "aggregation"), [*product(LOSSES, AGGREGATIONS)])
def test_the_gradient_is_that_of_the_papers_formula(loss, aggregation):
    config = make_config(algorithm__loss=loss, training__aggregation=aggregation, training__entropy_coef=0.0)
    terms = PolicyTerms(config.objectives, config.training)
    moves = [PLAYED[name][t][1] for name, t in DECISIONS]
    parts = [segment(name, t, len(row)) for (name, t), row in zip(DECISIONS, moves, strict=True)]
    planned = PLANNED if aggregation == "constant" else 1.0
    batch = make_batch(
        parts,
        row_tokens=16,
        level=terms.unit_levels["actor"],
        advantages={name: [advantage for advantage, _ in rows] for name, rows in PLAYED.items()},
        weights=[[w / planned for w in row] for row in AGGREGATIONS[aggregation].weights(parts, None)],
        proximal=[[OLD] * len(row) for row in moves],
    )
    order = torch.argsort(batch.packed.segment_N, stable=True)  # as they were packed -> as they were given
    now_N = torch.empty(14)
    now_N[order] = torch.tensor([OLD + d for row in moves for d in row])
    now_N.requires_grad_()
    found, _ = terms.of(batch, now_N, torch.zeros(14), terms.sums(batch))
    found.backward()
    torch.testing.assert_close(
        now_N.grad[order].double(), paper_gradient(loss, aggregation), atol=1e-6, rtol=0
    )
