"""The loss of a critic, and its columns of a packed batch."""

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
    """[N] columns for the value loss, in the order of the policy loss's columns."""

    value_N: Tensor
    """float32, V before the update."""
    return_N: Tensor
    """float32, target of V."""
    weight_N: Tensor
    """float32; 0 if no value is read; sums to 1 over the optimizer step."""


def critic_columns(
    segments: Sequence[Segment], targets: Mapping[str, CriticTargets], order: Sequence[int]
) -> CriticColumns:
    """Build the columns of one optimizer step; each value that is read has the same weight.

        w = 1 / (decisions of the step), or for values by token 1 / (sampled tokens of the step)

    Targets are by rollout id; `order` is the packing order of the segments. Raises BatchError as
    `read_column`.
    """
    values = {name: item.values for name, item in targets.items()}
    returns = {name: item.returns for name, item in targets.items()}
    value_columns = [read_column(segment, values, "value") for segment in segments]
    return_columns = [read_column(segment, returns, "return") for segment in segments]
    # At each sampled token, or at the first of a decision.
    read = [(offsets(part) == 0) | isinstance(values[part.rollout_id], ByToken) for part in segments]
    share = 1.0 / sum(int(row.sum()) for row in read)

    def joined(columns: Sequence[NDArray[Any]]) -> Tensor:
        return torch.from_numpy(np.concatenate([columns[i] for i in order])).float()

    weights = [np.where(row, share, 0.0) for row in read]
    return CriticColumns(joined(value_columns), joined(return_columns), joined(weights))


def value_loss(values: Tensor, columns: CriticColumns, *, clip: float | None) -> Tensor:
    """Compute half the squared error of the values, as a weighted sum.

        loss = sum(w * 1/2 * (V - R)^2)

    With clip = c, the larger error of V and V_old + clamp(V - V_old, -c, c) counts, so a value that moved by
    more than c towards R has no gradient. `values` [N] come from the critic in training; they are not
    read where the weight is 0. Losses of micro-batches add up.

    Source: the clip: Dhariwal et al., OpenAI Baselines, ppo2 (2017); not in the paper of PPO.
    """
    # Before the square, because NaN * 0 is NaN in its gradient.
    values = values.where(columns.weight_N != 0, columns.value_N)
    error = (values - columns.return_N).square()
    if clip is not None:
        moved = (values - columns.value_N).clamp(-clip, clip)
        error = error.maximum((columns.value_N + moved - columns.return_N).square())
    return weighted_sum(0.5 * error, columns.weight_N)
