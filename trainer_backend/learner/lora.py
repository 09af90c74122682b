"""Selects and checks the layers that get low-rank adapters by `peft` (the job's [lora] table).

    y = x W^T + (alpha / rank) * x A^T B^T        A [rank, in], B [out, rank]; B is 0 at first

Only A and B are trained, in float32; W is not changed. Learner and engine compute this sum, never
x (W + (alpha / rank) * B A)^T, because a small product B A would be rounded away if it were added to W in
bfloat16. Adapters are merged into W only in the model folders of checkpoints, in float32.

The reference policy of the KL is the same model with the adapters of the start of RL, so no second copy of
the model is needed. After a warm-up these adapters are not 0.

Source: Hu et al., LoRA, arXiv:2106.09685.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from inspect import getsource
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shared_schemas.base import did_you_mean
from trainer_backend.errors import JobError
from trainer_backend.job.training_table import ALL_LINEAR, LoraTable


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name and module of each layer that has an adapter."""
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "lora_dropout"))


def adapted_layers(model: PreTrainedModel, targets: Sequence[str]) -> dict[str, nn.Linear]:
    """Return the linear layers that get an adapter, by name. The model may be on the meta device.

    As in peft, a target is a layer's whole name or the end of it. Raises JobError if a target matches the
    embedding, the head, or a layer whose adapter the model would not compute. Also raises JobError if a
    target matches no linear layer and no expert; peft skips such a target if another one matches.
    """
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    ends = {id(model.get_input_embeddings()): "the embedding", id(head): "the head"}
    for name, module in model.named_modules():
        if id(module) in ends and any(_is_target(target, name) for target in targets):
            raise JobError(
                f"lora.target_modules includes {ends[id(module)]} ({name}), which may be tied to the model's "
                "other end, and which scoring reads directly; leave it out"
            )
    every = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    reasons = {name: _why_not_adapted(model, name, module) for name, module in every.items()}
    linear = {name: module for name, module in every.items() if reasons[name] is None}
    if ALL_LINEAR in targets:
        return linear
    for target in targets:
        if left_out := [name for name in every if _is_target(target, name) and name not in linear]:
            raise JobError(
                f"lora.target_modules includes {left_out[0]}, {reasons[left_out[0]]}; leave it out"
            )
        if not any(_is_target(target, name) for name in (*linear, *adapted_experts(model, [target]))):
            known = {ALL_LINEAR, *(name.rpartition(".")[2] for name in linear)}
            raise JobError(
                f"lora.target_modules: the model has no linear layer {target!r}{did_you_mean(target, known)}"
                f"{_name_experts(model)}"
            )
    return {name: layer for name, layer in linear.items() if any(_is_target(one, name) for one in targets)}


def _why_not_adapted(model: PreTrainedModel, name: str, layer: nn.Linear) -> str | None:
    """Return the reason why the model would not compute an adapter of `layer`; None if it would."""
    if type(layer).forward is not nn.Linear.forward:
        return f"a {type(layer).__name__}, which computes more than a product"
    parent, _, own = name.rpartition(".")
    kind: type = type(model.get_submodule(parent))
    if f"self.{own}.weight" in _source(kind):
        return "whose weight its layer reads directly, without the adapter"
    return None


@cache
def _source(kind: type) -> str:
    """Return the source code of a class. Cached, because `getsource` is slow and layers share classes."""
    return getsource(kind)


def adapted_experts(model: PreTrainedModel, targets: Sequence[str]) -> dict[str, nn.Parameter]:
    """Return the weights of experts that get an adapter, one tensor per layer, by name.

    A target of experts includes their module, as in "experts.down_proj", because a linear layer may also be
    called "down_proj".
    """
    named = [target for target in targets if names_experts(target)]
    fused = _fused_experts(model) if named else {}
    return {name: one for name, one in fused.items() if any(_is_target(target, name) for target in named)}


def refuse_experts(model: PreTrainedModel, table: LoraTable, *, engine: str, ranks: int) -> None:
    """Raise JobError if the job adapts experts, but the adapters cannot be added to the experts' weights."""
    found = adapted_experts(model, table.target_modules)
    low = next((weight.dtype for weight in found.values() if weight.dtype != torch.float32), None)
    reasons = {
        f"lora.dropout is {table.dropout}, which cannot drop their inputs": table.dropout > 0,
        f"in {str(low).removeprefix('torch.')} most of a small product is rounded away": low is not None,
        f"{ranks} ranks share these weights out": ranks > 1,
        "vLLM servers take adapters of linear layers only": engine == "vllm",
    }
    for reason, holds in reasons.items():
        if found and holds:
            raise JobError(
                f"lora.target_modules includes {next(iter(found))}: adapters of experts are added to their "
                f"weights, and {reason}; leave it out"
            )


def _fused_experts(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the weights [E, ., .] that each contain all E experts of a layer, by name, without biases."""
    weights = model.named_parameters()
    return {name: weight for name, weight in weights if names_experts(name) and weight.dim() == 3}


def names_experts(name: str) -> bool:
    return ".experts." in f".{name}"


def _name_experts(model: PreTrainedModel) -> str:
    """Return the end of an error message: how to name the model's experts. Empty if it has none."""
    fused = next(iter(_fused_experts(model)), None)
    if fused is None:
        return ""
    return f"; its experts are one tensor per layer ({fused}), named experts.{fused.rpartition('.')[2]}"


def _is_target(target: str, name: str) -> bool:
    return f".{name}".endswith(f".{target}")
