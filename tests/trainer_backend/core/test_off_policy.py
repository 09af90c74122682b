"""Is the gradient that another policy's samples give the policy gradient? An exact enumeration.

Three tokens at two positions, the second depending on the first: nine sequences, each with its own reward.
Both policies are tables of logits. A batch holds all nine, weighted by how likely the sampler is to say them,
so its gradient is the expected one. prior-art/verl.md 1.2 has the same errors for other logits (0.25 by
token weights, 0.71 without any, 0.52 and 0.71 where the support was cut, 0.17 at the wrong temperature).
"""

from itertools import product

import pytest
import torch

from trainer_backend.core.behaviour import WeightKeys, behaviour_weights
from trainer_backend.core.losses import ClipKeys, clipped_policy_loss
from trainer_backend.core.objective import Objective, Tokens

SEQUENCES = list(product(range(3), repeat=2))
# Row 0: the first token; row 1 + y: the second token after y.
POLICY = torch.tensor(
    [[0.5, -0.5, 0.0], [1.0, 0.0, -1.0], [-0.5, 0.5, 1.0], [0.0, 1.0, -0.5]], dtype=torch.float64
)
OTHER = torch.tensor(
    [[0.0, 0.25, 0.5], [0.5, 0.25, 0.0], [0.25, 0.0, 0.75], [0.25, 0.5, -0.75]], dtype=torch.float64
)
REWARDS = torch.tensor([2.0, -1.0, 0.5, 0.0, 1.0, -0.5, 3.0, -2.0, 1.5], dtype=torch.float64)
UNITS = {"token": None, "episode": torch.arange(9).repeat_interleave(2)}


def score_all(logits, temperature=1.0):
    """[18] log-probs of both tokens of every sequence."""
    table = (logits / temperature).log_softmax(dim=-1)
    rows = [(table[0, first], table[1 + first, second]) for first, second in SEQUENCES]
    return torch.stack([value for row in rows for value in row])


def chances(logprobs):
    """[18] of both tokens of every sequence, how likely it is."""
    return logprobs.view(9, 2).sum(dim=1).exp().repeat_interleave(2)


def cut_to(logits, count):
    """The logits that top_k sampling draws from."""
    least = logits.topk(count, dim=-1).values[:, -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def true_gradient():
    logits = POLICY.clone().requires_grad_()
    (chances(score_all(logits)) * REWARDS.repeat_interleave(2) / 2).sum().backward()
    return logits.grad


def expected_gradient(objective, sampled, told=None, *, now=POLICY, proximal=POLICY):
    """Of a batch that `sampled` ([18] log-probs) draws, whose sampler says `told`; the policy being `now`."""
    told = sampled if told is None else told
    possible = sampled.isfinite()
    drawn = torch.where(possible, chances(sampled), 0.0)
    told = torch.where(told.isfinite(), told, 0.0)  # never drawn, so never told
    logits, before = now.clone().requires_grad_(), score_all(proximal)
    units = UNITS[objective.weighting.behaviour_weight_level]
    tokens = Tokens(
        logprobs=score_all(logits),
        proximal_logprobs=before,
        behaviour_logprobs=told,
        advantages=REWARDS.repeat_interleave(2),
        weights=drawn,
        behaviour_weights=behaviour_weights(before, told, units, objective.weighting),
        units=torch.arange(18) if units is None else units,
    )
    (-objective.surrogate(tokens, objective.unit_logs(tokens))).backward()
    return logits.grad


def objective(kind="decoupled", level="episode", **weighting):
    return Objective(
        kind,
        clipped_policy_loss,
        ClipKeys(clip_high=0.2),
        "token",
        WeightKeys(
            **{
                f"behaviour_weight_{key}": value
                for key, value in {"cap": 1e6, "level": level, **weighting}.items()
            }
        ),
    )


def error(gradient):
    """As a share of the true gradient's length."""
    true = true_gradient()
    return ((gradient - true).norm() / true.norm()).item()


def test_the_policys_own_samples_give_the_policy_gradient():
    assert error(expected_gradient(objective(), score_all(POLICY))) < 1e-12


@pytest.mark.parametrize("kind", ["decoupled", "reinforce"])
@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_another_policys_samples_give_it_too_by_the_weight_of_the_whole_sequence(kind, temperature):
    # the policy that is trained is softmax(logits / 1), whatever the other one sampled at
    assert error(expected_gradient(objective(kind), score_all(OTHER, temperature))) < 1e-12


def test_explicit_weights_give_it_from_whichever_proximal_policy():
    far = objective("reinforce")
    assert error(expected_gradient(far, score_all(OTHER), proximal=OTHER)) < 1e-12


SAMPLED, CUT = score_all(OTHER), score_all(cut_to(OTHER, 2))


@pytest.mark.parametrize(
    ("of", "sampled", "told", "expected"),
    [
        (objective(level="token"), SAMPLED, None, 0.5814),
        (objective(), SAMPLED, score_all(POLICY), 0.8170),
        (objective("single_ratio"), SAMPLED, None, 1.3563),
        (objective(cap=2.0), SAMPLED, None, 0.2581),
        (objective(cap=2.0, floor=0.5, mode="mask"), SAMPLED, None, 0.6409),
        (objective(), CUT, None, 0.6861),
        (objective(), CUT, SAMPLED, 0.6750),
        (objective(), score_all(OTHER, 0.8), SAMPLED, 0.0686),
    ],
    ids=[
        "token weights",
        "no weights",
        "clipped around the other policy",
        "truncated at 2",
        "0 outside [0.5, 2]",
        "support cut to 2 of 3, renormalised",
        "the same, log-probs as if it were not",
        "sampled at 0.8, log-probs at 1",
    ],
)
def test_what_else_is_done_with_them_does_not(of, sampled, told, expected):
    assert error(expected_gradient(of, sampled, told)) == pytest.approx(expected, abs=5e-5)
