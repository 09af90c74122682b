"""Weights that nobody trains: the base of adapters, the engine's copy, the reference of the KL term."""

import copy
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer_backend.core.logprobs import wide_product
from trainer_backend.learner.adapter_folder import FOLDER
from trainer_backend.learner.device import Placement
from trainer_backend.learner.lora import set_beside
from trainer_backend.models.precision import held_dtype


def hold_in(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert the matrices, and nothing but them; norms and biases are float32 (`models.precision`).

    `model.to(dtype)` would round the frequencies of rotary positions as well, and in bfloat16 tokens beyond
    the first hundreds would stand elsewhere.
    """
    for weight in model.parameters():
        weight.data = weight.data.to(held_dtype(weight, dtype))


def held_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy whose matrices are of `dtype`, without gradient; norms and biases are float32, buffers stay.

    Converted one by one: a copy in float32 beside the model need not fit.
    """
    converted = {
        id(weight): nn.Parameter(
            weight.detach().to(held_dtype(weight, dtype), copy=True), requires_grad=False
        )
        for weight in model.parameters()
    }
    # What deepcopy meets twice it takes from here; so tied weights stay tied.
    return copy.deepcopy(model, converted)


def copy_to_serve(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy for the engine: adapters and all, attention that takes a cache, logits of float32."""
    served = held_copy(model, dtype)
    served.set_attn_implementation("sdpa")
    if dtype != torch.float32:
        served.lm_head = Float32Head(served.lm_head.weight)
    served.eval()  # type: ignore[no-untyped-call]
    return served


def folder_to_serve(model: PreTrainedModel, folder: Path, placement: Placement) -> PreTrainedModel:
    """The float32 model of a folder for an engine on the placement; it is used up.

    Where a checkpoint's adapters are merged into weights that are to be rounded, they are set beside their
    base again: rounded, the sum may be the base alone, and not what was trained.
    """
    if placement.low is not None and (folder / FOLDER).is_dir():
        set_beside(model, folder / FOLDER)
    served = copy_to_serve(model, placement.held)
    served.to(placement.device)  # type: ignore[arg-type]
    return served


class Float32Head(nn.Module):
    """An LM head without bias whose factors are of low precision and whose sums are float32.

    Logits rounded to bfloat16 would be another distribution than the one that is trained: 0.06 nats off at a
    logit of 20.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., D] to [..., V]."""
        # Autocast would round the sums to what the factors are.
        with torch.autocast(hidden.device.type, enabled=False):
            logits = wide_product(hidden.flatten(0, -2).to(self.weight.dtype), self.weight.T)
        return logits.view(*hidden.shape[:-1], -1)
