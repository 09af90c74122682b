"""The load-balancing loss of a mixture of experts, and metrics of the load.

    loss = E * sum_e f_e * P_e

E is the number of experts, f_e the share of tokens that are sent to expert e, and P_e the mean probability
that the router gives to expert e. Shares and means are over all tokens and layers. If each token is sent to k
experts, the loss is k for an even load and usually larger for an uneven load. Only P has a gradient.

Source: Fedus et al., Switch Transformers, arXiv:2101.03961, equations 4 to 6. The layers are joined as in
transformers' `load_balancing_loss_func`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from trainer_backend.core.keys import Table
from trainer_backend.core.metric import Metric, Row

if TYPE_CHECKING:
    from torch import Tensor


class RouterKeys(Table):
    """Keys of a job for the router of a mixture of experts."""

    router_aux_coef: float | None = Field(default=None, ge=0)
    """for a model with experts: weight of the load-balancing loss in updates of the policy; this loss spreads
    tokens evenly over the experts, and costs one more forward pass in a step of several micro-batches;
    absent: router_aux_loss_coef of the model's config; 0: the loss is not used"""


def balance_loss(probability_E: Tensor, sent_E: Tensor, routed: float) -> Tensor:
    """Compute the load-balancing loss of a step, or the part that one of its micro-batches adds to the loss.

    Args:
        probability_E: the router's probabilities, summed over the tokens of this micro-batch and all layers.
        sent_E: number of tokens of the whole step sent to each expert, summed over all layers; no gradient.
        routed: number of tokens of the whole step, times the number of layers with experts.
    """
    return len(sent_E) * (sent_E / routed * probability_E).sum() / routed


METRICS = (
    Row(
        Metric("moe/load_max", "tokens of the busiest expert over those of an even load, 1 to E / k",
               "experts", "busiest"),
        Metric("moe/load_entropy", "entropy of the load over that of an even one"),
        Metric("moe/idle_experts", "experts without a token in a step", "experts", "idle"),
        when="only with experts, means over layers and steps",
        note="A token that segments share counts once, unless a loss balances the routers "
        "(`training.router_aux_coef`), which turns sharing off",
    ),
)  # fmt: skip


def load_metrics(sent_ME: Tensor) -> dict[str, float]:
    """Measure how evenly M layers send tokens to E experts; `sent_ME` counts the tokens of each expert."""
    experts = sent_ME.shape[1]
    share_ME = sent_ME.double() / sent_ME.sum(dim=1, keepdim=True)
    entropy_M = -share_ME.xlogy(share_ME).sum(dim=1)
    most = max(experts, 2)  # log 1 would divide by 0
    return {
        "moe/load_max": float(share_ME.amax(dim=1).mean()) * experts,
        "moe/load_entropy": float(entropy_M.mean() / entropy_M.new_tensor(most).log()),
        "moe/idle_experts": float((sent_ME == 0).sum(dim=1).double().mean()),
    }
