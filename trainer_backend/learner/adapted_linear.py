"""A linear layer with an adapter, as learner and engine compute it."""

from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor

from trainer_backend.learner.adapter_folder import ADAPTER


class AdaptedLinear(LoraLinear):
    """peft's layer, but the sum is rounded once.

    peft adds the adapter's product to an output of the base that is rounded already; of bfloat16, with its
    eight bits, half of what ten optimizer steps of 1e-5 have taught is gone then. Here the base's product is
    added to the adapter's inside one matrix product, whose sums are float32.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[..., in] to [..., out]."""
        base: Any = self.get_base_layer()
        low = self.lora_B[ADAPTER](self.lora_A[ADAPTER](self.lora_dropout[ADAPTER](x)))
        summed = torch.addmm(
            low.flatten(0, -2), x.flatten(0, -2), base.weight.T, beta=self.scaling[ADAPTER]
        ).view(low.shape)
        biased: Tensor = summed if base.bias is None else summed + base.bias.to(summed.dtype)
        return biased
