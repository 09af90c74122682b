"""Shards a model's weights over the ranks of a learner, by FSDP2 (torch's `fully_shard`).

Each layer is an FSDP unit, whose weights are gathered just before its forward and backward pass. Embedding,
last norm and head form one more unit. Adapters are small, so every rank keeps all of them, and
`Ranks.sum_gradients` sums their gradients.

Source: torch.distributed.fsdp.fully_shard; Zhao et al., PyTorch FSDP, arXiv:2304.11277.
"""

from collections.abc import Callable, Iterable
from datetime import timedelta
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel

from trainer_backend.errors import JobError
from trainer_backend.job.tables import LearnerTable
from trainer_backend.learner.ranks import Ranks
from trainer_backend.models.allowed_tokens import restrict_as_configured
from trainer_backend.models.text_part import decoder_layers, empty_model

Result = TypeVar("Result")
_RUN = "turnwise_run"


def through(module: nn.Module, function: Callable[..., Result], *arguments: Any) -> Result:
    """Return function(module, *arguments); if the module is sharded, gather its own weights for the call.

    FSDP itself gathers weights only for `forward`. The function must return a tensor or a tuple of tensors.
    """
    run: Callable[..., Result] | None = getattr(module, _RUN, None)
    return function(module, *arguments) if run is None else run(function, *arguments)


def make_mesh(ranks: Ranks, replicas: int, device: str) -> DeviceMesh:
    """Arrange the ranks in `replicas` groups that each hold all weights; all ranks must call this together.

    Raises JobError if the ranks cannot be divided into equal groups.
    """
    if ranks.count % replicas:
        raise JobError(
            f"{ranks.count} ranks cannot be divided into {replicas} equal groups",
            where="learner.data_parallel_replicate_degree",
        )
    shape = (ranks.count,) if replicas == 1 else (replicas, ranks.count // replicas)
    names = ("shard",) if replicas == 1 else ("replicate", "shard")
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    for group in mesh.get_all_groups():
        distributed_c10d._set_pg_timeout(timedelta(seconds=ranks.timeout_s), group)
    return mesh


def shard(model: PreTrainedModel, ranks: Ranks, table: LearnerTable, device: torch.device) -> None:
    """Shard the model's weights over the ranks, in place; only this rank's share moves to the device.

    Every rank must pass the same model, in main memory. Small weights are not sharded (`_select_whole`).
    """
    mesh = make_mesh(ranks, table.data_parallel_replicate_degree, device.type)
    apart = _select_whole(model)
    offload = OffloadPolicy()
    if table.fsdp_cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for module in (*decoder_layers(model), model):
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=table.fsdp_reshard_after_forward,
            offload_policy=offload,
            ignored_params=apart,
        )
        setattr(module, _RUN, MethodType(_run, module))
        register_fsdp_forward_method(module, _RUN)
        # Sum instead of average gradients, because token weights sum to 1 over all ranks.
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    for weight in apart:
        weight.data = weight.data.to(device)


def _select_whole(model: PreTrainedModel) -> set[nn.Parameter]:
    """Select the weights that are not sharded: adapters, and norms and biases of a low-precision base model.

    Such a base model has matrices of another dtype, and an FSDP unit must have a single dtype. The base model
    is then frozen, so these norms and biases need no gradient.
    """
    held = [(name, weight) for name, weight in model.named_parameters()]
    types = {weight.dtype for name, weight in held if ".lora_" not in name}
    return {weight for name, weight in held if ".lora_" in name or (len(types) > 1 and weight.dim() < 2)}


def _run(module: nn.Module, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the function; copy tensors of its result that are views, because views can lose FSDP's hooks."""
    found = function(module, *arguments)
    if isinstance(found, tuple):
        return tuple(tensor.clone() if tensor._is_view() else tensor for tensor in found)
    return found


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor. If it is sharded, it is gathered, so all ranks must call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor, ranks: Ranks) -> Tensor:
    """Return the elements of a tensor, [n], that this rank must add to a sum over all ranks.

    Every element is returned on one rank only. If other ranks hold copies of it, they get an empty tensor.
    """
    is_counted, own = ranks.is_first, tensor
    if isinstance(tensor, DTensor):
        own, place = tensor.to_local(), tensor.device_mesh.get_coordinate() or ()
        is_counted = not any(
            number for number, kind in zip(place, tensor.placements, strict=True) if kind.is_replicate()
        )
    return own.flatten() if is_counted else own.flatten()[:0]


def sent_to(tensor: Tensor, rank: int) -> Tensor | None:
    """Gather a tensor on the rank `rank` and return it there; return None on all other ranks."""
    own = dist.get_rank()
    if not isinstance(tensor, DTensor):
        return tensor if own == rank else None
    assert tensor.placements[-1] == Shard(0), "as FSDP shards by default"
    groups: Tensor = tensor.device_mesh.mesh
    members = next(group for group in groups.reshape(-1, groups.shape[-1]).tolist() if rank in group)
    if own not in members:
        return None  # this rank belongs to another replica of the weights
    share = tensor.to_local()
    if own != rank:
        if len(share):
            dist.send(share.contiguous(), dst=rank)
        return None
    full = share.new_empty(tensor.shape)
    rows = torch.split(full, -(-len(full) // len(members)))  # like FSDP; the last ranks may get no rows
    waits = []
    for member, part in zip(members, rows, strict=False):
        if member == own:
            part.copy_(share)
        else:
            waits.append(dist.irecv(part, src=member))
    for wait in waits:
        assert wait is not None, "it is not this rank"
        wait.wait()
    return full


def clip_gradient(weights: Iterable[Tensor], most: float) -> float:
    """Scale the gradient down to a norm of at most `most`; return the norm before the scaling."""
    return float(whole(torch.nn.utils.clip_grad_norm_(weights, most)))


def gathered_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a frozen, unsharded copy of the model in main memory, without adapters."""
    copied = empty_model(model.config)
    weights, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for name, module in copied.named_modules():
        for own in list(module._parameters):
            weight = weights.get(f"{name}.{own}")
            if weight is not None:  # None for all but the first name of a tied weight
                setattr(module, own, nn.Parameter(whole(weight).detach().cpu(), requires_grad=False))
        for own in list(module._buffers):
            module._buffers[own] = buffers[f"{name}.{own}"].cpu()
    copied.tie_weights()
    restrict_as_configured(copied)
    copied.eval()  # type: ignore[no-untyped-call]
    return copied


def laid_as(weight: Tensor, full: Tensor) -> Tensor:
    """Return the part of `full` that this rank must hold: a shard if `weight` is sharded, otherwise all."""
    if not isinstance(weight, DTensor):
        return full
    return distribute_tensor(
        full.to(weight.device), weight.device_mesh, weight.placements, src_data_rank=None
    )


def replace_whole(weight: Tensor, full: Tensor) -> None:
    """Copy a whole tensor into a weight. If the weight is sharded, only this rank's part is copied."""
    weight.copy_(laid_as(weight, full).to(weight.dtype))
