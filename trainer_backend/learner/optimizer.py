"""AdamW over the trained weights, with moments on their device or in main memory."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.optim.adamw import adamw
from transformers import PreTrainedModel

from trainer_backend.errors import CheckpointError
from trainer_backend.learner.sharding import laid_as, replace_whole

# At the same time, one part is computed, one is copied to main memory, and one is copied back to the GPU.
_LANES = 3


def make_adamw(
    model: PreTrainedModel,
    learning_rate: float,
    weight_decay: float,
    *,
    epsilon: float = 1e-8,
    betas: tuple[float, float] = (0.9, 0.999),
    offload: bool = False,
) -> torch.optim.AdamW:
    """Make the AdamW optimizer of a model's trainable weights; with `offload`, an OffloadedAdamW.

    Without `offload`, torch's fused AdamW is used on CUDA and on a CPU. The fused AdamW allocates memory only
    for the moments, before it changes any weight. So a first step that runs out of memory leaves the weights
    intact.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings: dict[str, Any] = {
        "lr": learning_rate, "weight_decay": weight_decay, "betas": betas, "eps": epsilon,
    }  # fmt: skip
    if offload:
        return OffloadedAdamW(trained, **settings)
    is_fused = trained[0].device.type in ("cuda", "cpu")
    return torch.optim.AdamW(trained, **settings, fused=True if is_fused else None)


def named_state(optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights by name, and their AdamW states as `name.exp_avg` and so on, to store in a file."""
    states = {name: optimizer.state.get(weight, {}) for name, weight in weights.items()}
    moments = {f"{name}.{key}": value for name, state in states.items() for key, value in state.items()}
    return {name: weight.detach() for name, weight in weights.items()} | moments


@contextmanager
def restored(
    optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor], path: Path, what: str
) -> Iterator[dict[str, Tensor]]:
    """Restore weights and AdamW states from a file that stores `named_state`; yield all tensors of the file.

    Each rank restores its own share. `what` names the restored object in errors.

    Raises CheckpointError if the file is missing, damaged or of another model, or if the context fails.
    """
    try:
        tensors = load_file(path)
        with torch.no_grad():
            for name, weight in weights.items():
                replace_whole(weight, tensors[name])
        state = {
            number: {"step": tensors[f"{name}.step"]}
            | {key: laid_as(weight, tensors[f"{name}.{key}"]) for key in ("exp_avg", "exp_avg_sq")}
            for number, (name, weight) in enumerate(weights.items())
            if f"{name}.step" in tensors
        }
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        yield tensors
    except Exception as error:  # safetensors and torch raise types of their own
        raise CheckpointError(f"{path}: {what} cannot be restored: {error}") from error


@dataclass(frozen=True, slots=True)
class _Part:
    """A part [n] of a weight and of its gradient, on their device, and its moments [n] in main memory."""

    weight: Tensor
    gradient: Tensor
    moments: tuple[Tensor, Tensor]
    step: Tensor
    group: dict[str, Any]

    def take_step(self, here: Tensor, gradient: Tensor) -> None:
        """Apply one AdamW step, in place, to `here`, the copy of this part of the weight in main memory."""
        group = self.group
        adamw(
            [here], [gradient], [self.moments[0]], [self.moments[1]], [], [self.step.clone()],
            fused=True, amsgrad=False, maximize=False, lr=group["lr"], eps=group["eps"],
            beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=group["weight_decay"],
        )  # fmt: skip


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW with its moments in main memory, which saves 8 bytes per trained weight on the device.

    The CPU computes the step in float32. Weights are split into parts. Each part and its gradient are copied
    to main memory, and the updated part is copied back. On CUDA, parts are copied through pinned memory while
    another part is computed. For weights on a CPU the result equals that of `torch.optim.AdamW`.
    """

    part_numbers = 2**24
    """Largest number of weights in a part. Each of _LANES buffers has 8 bytes of pinned memory per weight."""
    _lanes: "_Lanes | None" = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise TypeError("a closure is not supported: gradients must be computed before the step")
        trained = [
            (weight, group) for group in self.param_groups for weight in group["params"]
            if weight.grad is not None
        ]  # fmt: skip
        if trained and trained[0][0].is_cuda:
            parts = [part for weight, group in trained for part in self._parts(weight, group)]
            self._lanes = self._lanes or _Lanes(
                max(len(part.weight) for part in parts), parts[0].weight.device
            )
            self._lanes.take_steps(parts)
        else:
            for weight, group in trained:
                for part in self._parts(weight, group, most=weight.numel()):
                    here = part.weight.cpu()  # the weight itself if it is on the CPU
                    part.take_step(here, part.gradient.cpu())
                    if here.device != part.weight.device:
                        part.weight.copy_(here)
        for weight, _ in trained:
            self.state[weight]["step"] += 1

    def _parts(self, weight: Tensor, group: dict[str, Any], most: int | None = None) -> Iterator[_Part]:
        state, most = self.state[weight], most or self.part_numbers
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(weight, device="cpu")
        assert weight.grad is not None, "called only for weights with a gradient"
        own = (weight.detach(), state["exp_avg"], state["exp_avg_sq"])
        # `view`, because a step on copies of the weight or moments would be lost.
        columns = [torch.split(column.view(-1), most) for column in own]
        for here, *moments, gradient in zip(
            *columns, torch.split(weight.grad.reshape(-1), most), strict=True
        ):
            yield _Part(here, gradient, (moments[0], moments[1]), state["step"], group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into main memory. torch's own method would move moments to the weights' device."""
        super().load_state_dict({**state_dict, "state": {}})
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for number, values in state_dict["state"].items():
            # Copy: a step writes into the moments, and the caller may still use the loaded tensors.
            self.state[weights[number]] = {name: value.cpu().clone() for name, value in values.items()}


class _Lanes:
    """Copies parts between a GPU and the CPU through pinned buffers (lanes), on a separate CUDA stream.

    All copies use this one stream, so a part has left its lane before the next part is copied into the lane.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._lanes = [
            (torch.empty((2, most), dtype=torch.float32, pin_memory=True), torch.cuda.Event())  # type: ignore[no-untyped-call]
            for _ in range(_LANES)
        ]

    def take_steps(self, parts: Sequence[_Part]) -> None:
        """Apply the AdamW step to all parts. Later work on the current CUDA stream waits for the copies."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        for index in range(min(_LANES - 1, len(parts))):
            self._fetch(index, parts[index])
        for index, part in enumerate(parts):
            ahead = index + _LANES - 1
            if ahead < len(parts):
                self._fetch(ahead, parts[ahead])
            lane, is_down = self._lanes[index % _LANES]
            is_down.synchronize()
            weight, gradient = lane[:, : len(part.weight)]
            part.take_step(weight, gradient)
            with torch.cuda.stream(self._stream):
                part.weight.copy_(weight, non_blocking=True)
        current.wait_stream(self._stream)

    def _fetch(self, index: int, part: _Part) -> None:
        lane, is_down = self._lanes[index % _LANES]
        with torch.cuda.stream(self._stream):
            for here, there in zip(lane[:, : len(part.weight)], (part.weight, part.gradient), strict=True):
                here.copy_(there, non_blocking=True)
            is_down.record()
