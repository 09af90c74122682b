"""Counts how many tokens a mixture-of-experts model routes to each expert, by hooks on its modules."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer_backend.core.router_loss import RouterKeys
from trainer_backend.errors import JobError
from trainer_backend.models.routers import count_experts


@dataclass(frozen=True, slots=True)
class Experts:
    count: int
    """Number of experts of each layer, E."""
    coefficient: float = 0.0
    """Coefficient of the load-balancing loss; 0 if the model has no such loss."""


def find_experts(model: PreTrainedModel, keys: RouterKeys) -> Experts | None:
    """Describe the experts of a model; return None if it has none.

    The coefficient is the job's `router_aux_coef` or, if the job does not set it, the one in the model's
    config. Raises JobError if the job sets one other than 0, but the model has no load-balancing loss.
    """
    config, coefficient = model.config.get_text_config(), keys.router_aux_coef
    count = count_experts(model)
    has_loss = hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func")
    if not any(True for _ in _expert_layers(model)):
        count = 0
    if coefficient and not (count and has_loss):
        reason = "whose family balances experts without a loss" if count else "which has no experts"
        raise JobError(
            f"is {coefficient:g}, but the model is {type(model).__name__}, {reason}",
            where="training.router_aux_coef",
            hint="Leave the key out.",
        )
    if not count:
        return None
    if coefficient is None:
        coefficient = float(getattr(config, "router_aux_loss_coef", None) or 0.0)
    return Experts(count, coefficient if has_loss else 0.0)


@dataclass(slots=True)
class Routing:
    """Sums the routing of tokens to experts over several forward passes; padding is not counted."""

    experts: Experts
    reads_probabilities: bool
    sent: list[Tensor] = field(default_factory=list)
    """For each layer with experts, [E]: how many tokens were routed to each expert."""
    probability_E: Tensor | None = None
    """[E], the sum of the routers' probabilities over tokens and layers; None before the first `add`."""

    @property
    def keywords(self) -> dict[str, bool]:
        """The keyword arguments with which the model's forward pass must be called."""
        return {"output_router_logits": True} if self.reads_probabilities else {}

    @contextmanager
    def watching(self, model: PreTrainedModel, real_BL: Tensor | None) -> Iterator[None]:
        """Count the tokens that one forward pass inside the context routes to each expert.

        `real_BL` is False for padding; None if there is no padding.
        """
        chosen: list[Tensor] = []

        def note(module: nn.Module, given: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            tensors = [value for value in (*given, *keywords.values()) if isinstance(value, Tensor)]
            indices = [one for one in tensors if not (one.is_floating_point() or one.dtype == torch.bool)]
            if indices:
                chosen.append(indices[0].detach())

        hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in _expert_layers(model)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        sent = [self._count_sent(index_Rk, real_BL) for index_Rk in chosen]
        self.sent = [a + b for a, b in zip(self.sent, sent, strict=True)] if self.sent else sent

    def _count_sent(self, index_Rk: Tensor, real_BL: Tensor | None) -> Tensor:
        index_Rk = index_Rk.reshape(-1, index_Rk.shape[-1])
        counts_R = (
            index_Rk.new_ones(len(index_Rk)) if real_BL is None else real_BL.flatten().to(index_Rk.dtype)
        )
        sent_E = index_Rk.new_zeros(self.experts.count + 1)  # the last entry counts experts on other devices
        return sent_E.scatter_add_(0, index_Rk.flatten(), counts_R.repeat_interleave(index_Rk.shape[1]))[:-1]

    def add(self, logits: tuple[Tensor, ...], real_BL: Tensor | None) -> None:
        """Add the routers' probabilities in a forward pass to `probability_E`.

        `logits` contains the router's logits of each layer, [tokens, E]. `real_BL` is as in `watching`.
        """
        for logits_RE in logits:
            probability_RE = logits_RE.reshape(-1, self.experts.count).float().softmax(dim=-1)
            if real_BL is not None:
                probability_RE = probability_RE * real_BL.reshape(-1, 1)
            total_E = probability_RE.sum(dim=0)
            self.probability_E = total_E if self.probability_E is None else self.probability_E + total_E


def _expert_layers(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Return the modules that compute the experts, one per layer.

    The inputs of such a module are the hidden states of tokens and the indices of their experts.
    """
    return (module for name, module in model.named_modules() if name.endswith(".experts"))
