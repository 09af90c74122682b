"""The loss of a critic, and the tensors of a packed batch from which it is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer_backend.core.critic import ByToken, CriticTargets, offsets, read_column
from trainer_backend.core.losses import weighted_sum
from trainer_backend.core.segments import Segment


@dataclass(frozen=True, slots=True)
class CriticColumns:
    """One number per sampled token for the value loss, in the token order of the policy loss."""

    value_N: Tensor
    """float32, value V that the critic predicted before the update."""
    return_N: Tensor
    """float32, return R: the target of V."""
    weight_N: Tensor
    """float32, weight in the loss; 0 where no value is read. The weights of an optimizer step sum to 1."""


def critic_columns(
    segments: Sequence[Segment], targets: Mapping[str, CriticTargets], order: Sequence[int]
) -> CriticColumns:
    """Build the columns of one optimizer step; each value that is read has the same weight w.

        w = 1 / (number of decisions in the step)         if the critic predicts a value per decision
        w = 1 / (number of sampled tokens in the step)    if the critic predicts a value per token

    The keys of `targets` are rollout ids. `order` contains the indices of the segments in packing order.
    Raises BatchError if `read_column` does.
    """
    values = {name: item.values for name, item in targets.items()}
    returns = {name: item.returns for name, item in targets.items()}
    value_columns = [read_column(segment, values, "value") for segment in segments]
    return_columns = [read_column(segment, returns, "return") for segment in segments]
    # True where a value is read: at each sampled token, or at the first token of a decision.
    read = [(offsets(part) == 0) | isinstance(values[part.rollout_id], ByToken) for part in segments]
    share = 1.0 / sum(int(row.sum()) for row in read)

    def joined(columns: Sequence[NDArray[Any]]) -> Tensor:
        return torch.from_numpy(np.concatenate([columns[i] for i in order])).float()

    weights = [np.where(row, share, 0.0) for row in read]
    return CriticColumns(joined(value_columns), joined(return_columns), joined(weights))


def value_loss(values: Tensor, columns: CriticColumns, *, clip: float | None) -> Tensor:
    """Compute half the squared error of the values, as a weighted sum.

        loss = sum(w * 1/2 * (V - R)^2)

    `values` [N] are the values V that the critic in training predicts; they are ignored where the weight w is
    0. R are the returns. The losses of micro-batches sum to the loss of the step.

    With clip = c, the squared errors of V and of V_old + clamp(V - V_old, -c, c) are compared, and the larger
    one counts. V_old is the value before the update. A value that moved towards R by more than c thus has no
    gradient.

    Source of the clip: Dhariwal et al., OpenAI Baselines, ppo2 (2017). The paper of PPO does not have it.
    """
    # Ignored values are replaced before the square, because its gradient NaN * 0 would be NaN.
    values = values.where(columns.weight_N != 0, columns.value_N)
    error = (values - columns.return_N).square()
    if clip is not None:
        moved = (values - columns.value_N).clamp(-clip, clip)
        error = error.maximum((columns.value_N + moved - columns.return_N).square())
    return weighted_sum(0.5 * error, columns.weight_N)
