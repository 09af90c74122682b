"""AdamW over the weights that are trained; its moments on their device, or in main memory."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from transformers import PreTrainedModel


def adamw_of(
    model: PreTrainedModel,
    *,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
    offload: bool = False,
) -> torch.optim.AdamW:
    """The optimizer of a model's trainable weights.

    On CUDA it is torch's fused one: it allocates nothing beside the moments, and those before it changes a
    weight, so that running out of memory in its first step leaves the weights whole.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings: dict[str, Any] = {"lr": learning_rate, "weight_decay": weight_decay, "betas": betas}
    if offload:
        return OffloadedAdamW(trained, **settings)
    return torch.optim.AdamW(trained, **settings, fused=True if trained[0].is_cuda else None)


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW whose moments live in main memory: 8 bytes less on the device for every trained weight.

    A weight and its gradient travel down and the weight up again, one tensor at a time, and the step is
    computed on the CPU in float32. For weights on a CPU the numbers are those of `torch.optim.AdamW`.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise TypeError("a closure is not supported: the gradients are there before the step")
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step_one(weight, weight.grad.cpu(), group)

    def _step_one(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        here = weight.detach().cpu()  # the weight itself where it is on the CPU already
        state = self.state[weight]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(here), torch.zeros_like(here)
        adamw(
            [here], [gradient], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]],
            foreach=False, amsgrad=False, maximize=False, lr=group["lr"], eps=group["eps"],
            beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=group["weight_decay"],
        )  # fmt: skip
        if weight.device != here.device:
            weight.copy_(here)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but for the moments: torch would put them on the weights' device."""
        super().load_state_dict({**state_dict, "state": {}})
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for number, values in state_dict["state"].items():
            # A copy: a step writes into it, and what was loaded may be somebody else's.
            self.state[weights[number]] = {name: value.cpu().clone() for name, value in values.items()}
