"""A model whose weights are shared out to the ranks of a learner, by FSDP2 (torch's `fully_shard`).

Each layer is one unit, whose weights are gathered for its forward and backward pass; embedding, last norm and
head are another. Adapters are small: every rank has them whole, and sums their gradients itself.

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
from trainer_backend.models.text_part import decoder_layers, empty_model

Result = TypeVar("Result")
_RUN = "turnwise_run"


def through(module: nn.Module, function: Callable[..., Result], *arguments: Any) -> Result:
    """Return function(module, *arguments), with the module's own weights whole where it is sharded.

    FSDP knows to gather them for `forward` alone. The function's results are tensors, or a tuple of them.
    """
    run: Callable[..., Result] | None = getattr(module, _RUN, None)
    return function(module, *arguments) if run is None else run(function, *arguments)


def make_mesh(ranks: Ranks, replicas: int, device: str) -> DeviceMesh:
    """How the ranks lie: `replicas` groups that hold all weights each. All ranks ask for it first together.

    Raises JobError where they cannot be cut into so many equal groups.
    """
    if ranks.count % replicas:
        raise JobError(
            f"{replicas} groups are asked for, and {ranks.count} ranks cannot be cut into so many equal ones",
            where="learner.data_parallel_replicate_degree",
        )
    shape = (ranks.count,) if replicas == 1 else (replicas, ranks.count // replicas)
    names = ("shard",) if replicas == 1 else ("replicate", "shard")
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    for group in mesh.get_all_groups():
        distributed_c10d._set_pg_timeout(timedelta(seconds=ranks.timeout_s), group)
    return mesh


def shard(model: PreTrainedModel, ranks: Ranks, table: LearnerTable, device: torch.device) -> None:
    """Share the model's weights out to the ranks, in place; the device gets this rank's share alone.

    The model is the same on every rank, in main memory; small weights are left whole (`_apart`).
    """
    mesh = make_mesh(ranks, table.data_parallel_replicate_degree, device.type)
    apart = _apart(model)
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
        # By default gradients are averaged. The weights of a step's tokens sum to 1 over all ranks.
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    for weight in apart:
        weight.data = weight.data.to(device)


def _apart(model: PreTrainedModel) -> set[nn.Parameter]:
    """The weights that every rank holds whole: adapters; with low-precision matrices, norms and biases too.

    FSDP gathers weights of one type at a time. With matrices of low precision, the whole base is frozen.
    """
    held = [(name, weight) for name, weight in model.named_parameters()]
    types = {weight.dtype for name, weight in held if ".lora_" not in name}
    return {weight for name, weight in held if ".lora_" in name or (len(types) > 1 and weight.dim() < 2)}


def _run(module: nn.Module, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what the function does; no views, on which FSDP's hooks could be lost."""
    found = function(module, *arguments)
    if isinstance(found, tuple):
        return tuple(tensor.clone() if tensor._is_view() else tensor for tensor in found)
    return found


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or a sharded one gathered from all ranks, which all have to ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor, ranks: Ranks) -> Tensor:
    """[n] numbers of a tensor that this rank adds to a sum; of what several have, the first adds it."""
    is_counted, own = ranks.is_first, tensor
    if isinstance(tensor, DTensor):
        own, place = tensor.to_local(), tensor.device_mesh.get_coordinate() or ()
        is_counted = not any(
            number for number, kind in zip(place, tensor.placements, strict=True) if kind.is_replicate()
        )
    return own.flatten() if is_counted else own.flatten()[:0]


def sent_to(tensor: Tensor, rank: int) -> Tensor | None:
    """The whole of a tensor, to which the others send their rows, on one rank; None on these."""
    own = dist.get_rank()
    if not isinstance(tensor, DTensor):
        return tensor if own == rank else None
    assert tensor.placements[-1] == Shard(0), "as FSDP shards by default"
    groups: Tensor = tensor.device_mesh.mesh
    members = next(group for group in groups.reshape(-1, groups.shape[-1]).tolist() if rank in group)
    if own not in members:
        return None  # a copy of what they have
    share = tensor.to_local()
    if own != rank:
        if len(share):
            dist.send(share.contiguous(), dst=rank)
        return None
    full = share.new_empty(tensor.shape)
    rows = torch.split(full, -(-len(full) // len(members)))  # as FSDP cuts; the last ranks may have none
    waits = []
    for member, part in zip(members, rows, strict=False):
        if member == own:
            part.copy_(share)
        else:
            waits.append(dist.irecv(part, src=member))
    for wait in waits:
        assert wait is not None, "the other rank is another one"
        wait.wait()
    return full


def clip_gradient(weights: Iterable[Tensor], most: float) -> float:
    """Scale the gradient down to the norm `most`, where it is longer; return its norm before that."""
    return float(whole(torch.nn.utils.clip_grad_norm_(weights, most)))


def gathered_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The whole model in main memory, gathered tensor by tensor; without adapters."""
    copied = empty_model(model.config)
    weights, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for name, module in copied.named_modules():
        for own in list(module._parameters):
            weight = weights.get(f"{name}.{own}")
            if weight is not None:  # of tied ones the first alone
                setattr(module, own, nn.Parameter(whole(weight).detach().cpu(), requires_grad=False))
        for own in list(module._buffers):
            module._buffers[own] = buffers[f"{name}.{own}"].cpu()
    copied.tie_weights()
    copied.eval()  # type: ignore[no-untyped-call]
    return copied


def laid_as(weight: Tensor, full: Tensor) -> Tensor:
    """A whole tensor as a weight lies: itself, or this rank's share of it."""
    if not isinstance(weight, DTensor):
        return full
    return distribute_tensor(
        full.to(weight.device), weight.device_mesh, weight.placements, src_data_rank=None
    )


def replace_whole(weight: Tensor, full: Tensor) -> None:
    """Write a whole tensor into a weight, of which this rank may have a share alone."""
    weight.copy_(laid_as(weight, full).to(weight.dtype))
