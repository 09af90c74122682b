"""Records which experts the routers of a mixture-of-experts model choose, and replays the choices later.

In every model family, a router selects k of E experts with one call of `torch.topk` on [tokens, E] scores.
Families differ in how they compute the scores and the weights of experts. A replay replaces the result of the
`topk` call: it returns the recorded indices, and the scores that the router now computes for these indices.
So the weights of the experts, and their gradients, still come from the router.

Source: Ma et al., Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers ("R3"),
arXiv:2510.11370.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from trainer_backend.errors import ModelFolderError
from trainer_backend.models.precision import tokens_for

log = structlog.get_logger(__name__)

# (index of the router, its own choice [T, k]) -> the choice to use, [T, k].
Choose = Callable[[int, Tensor], Tensor]
_TOPK = (torch.topk, Tensor.topk)
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def count_experts(model: PreTrainedModel) -> int:
    """Return the number of experts per layer; 0 for a model without experts."""
    config = model.config.get_text_config()
    return next((int(value) for name in _COUNTS if (value := getattr(config, name, None))), 0)


class Routers:
    """Reads and replaces the choices of a model's routers. `len` is 0 for a model without experts."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._experts = count_experts(model)
        self._modules = [
            router
            for module in model.modules()
            if isinstance(getattr(module, "experts", None), nn.Module)
            and isinstance(router := getattr(module, "gate", getattr(module, "router", None)), nn.Module)
        ]

    def __len__(self) -> int:
        return len(self._modules)

    @contextmanager
    def choosing(self, choose: Choose, *, alone: bool = False) -> Iterator[None]:
        """Let `choose` select the experts inside the context.

        `choose` receives the index of a router and the router's choice [T, k], and returns the new choice. If
        `choosing` contexts are nested, outer ones replace the router's choice first, unless `alone` is true.
        """
        hooks = []
        try:
            for number, router in enumerate(self._modules):
                mode = _Choice(self._experts, partial(choose, number), alone=alone)
                hooks.append(router.register_forward_pre_hook(mode.begin))
                # Prepended, so that of nested contexts the inner one ends first.
                hooks.append(router.register_forward_hook(mode.end, prepend=True, always_call=True))
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Yield a list that receives each router's choice [T, k] in the context, in the order of layers."""
        chosen: list[Tensor] = []

        def note(number: int, own_Tk: Tensor) -> Tensor:
            chosen.append(own_Tk)
            return own_Tk

        with self.choosing(note):
            yield chosen

    def columns(self, chosen: list[Tensor], *, rows: int) -> NDArray[np.uint16]:
        """Return the choices that `recording` collected in one forward pass as [B, L, W], W = layers * k.

        Args:
            rows: B, the number of sequences in the pass.

        Raises:
            ModelFolderError: a router did not call `topk` exactly once in the pass.
        """
        if len(chosen) != len(self):
            raise ModelFolderError(
                f"its {len(self)} routers made {len(chosen)} choices of experts in one pass, so they cannot "
                "be recorded",
                where="model",
                hint="Set inference.replay_experts = false; mismatch/logprob_max then shows how much "
                "sampler and learner differ.",
            )
        columns_TW = torch.cat(chosen, dim=1).cpu().numpy().astype(np.uint16)
        return columns_TW.reshape(rows, -1, columns_TW.shape[1])


@torch.inference_mode()
def recorded_routers(model: PreTrainedModel, *, wanted: bool | None) -> Routers | None:
    """Return the routers of `model` if the engine should record their choices, and None if it should not.

    Args:
        wanted: the job's setting. None: record if the model allows it, but not in float32, because sampler
            and learner choose the same experts in float32.

    Raises:
        ModelFolderError: `wanted` is True, but the choices cannot be recorded.
    """
    routers = Routers(model)
    if wanted is False or not len(routers) or (wanted is None and model.dtype == torch.float32):
        return None
    low = None if model.dtype == torch.float32 else model.dtype
    arithmetic = nullcontext() if low is None else torch.autocast(model.device.type, dtype=low)
    try:
        with arithmetic, routers.recording() as chosen:
            ids_BL = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
            model(**tokens_for(model, ids_BL, low), use_cache=False)
        routers.columns(chosen, rows=1)
    except ModelFolderError as error:
        if wanted:
            raise
        log.warning("engine_records_no_experts", model=type(model).__name__, reason=error.detail)
        return None
    return routers


# Opens the context of the current replay. A layer with activation checkpointing stores it (`again`) for its
# recomputation in the backward pass, which may run after the replay has ended, or inside another replay.
_replay: ContextVar[Callable[[], AbstractContextManager[None]] | None] = ContextVar("_replay", default=None)


@contextmanager
def replaying(model: PreTrainedModel, experts_BLW: Tensor | None) -> Iterator[None]:
    """Replay recorded choices of experts inside the context.

    Args:
        experts_BLW: the recorded choices, in the layout of `Routers.columns`. Where an expert's number is
            below 0, the router's own choice is used. None: no replay.

    Raises:
        ModelFolderError: the model's routers do not choose W experts per token in total.
    """
    if experts_BLW is None:
        yield
        return
    routers = Routers(model)
    experts_TW = experts_BLW.flatten(0, 1)
    if not len(routers) or experts_TW.shape[1] % len(routers):
        raise ModelFolderError(
            f"{experts_TW.shape[1]} experts are recorded for each token, but the model has {len(routers)} "
            "routers: another model sampled the tokens",
            where="model",
        )
    by_router = experts_TW.view(len(experts_TW), len(routers), -1).unbind(1)

    def prescribe(number: int, own_Tk: Tensor) -> Tensor:
        replay_Tk = by_router[number].to(own_Tk.dtype)
        if replay_Tk.shape != own_Tk.shape:
            raise ModelFolderError(
                f"{replay_Tk.shape[1]} experts a layer are recorded for each token, but the model's routers "
                f"choose {own_Tk.shape[1]}: another model sampled the tokens",
                where="model",
            )
        return torch.where(replay_Tk >= 0, replay_Tk, own_Tk)

    token = _replay.set(lambda: routers.choosing(prescribe, alone=True))
    try:
        with routers.choosing(prescribe):
            yield
    finally:
        _replay.reset(token)


def again() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts for a layer's forward pass and for its recomputation, which repeats the replay.

    Serves as `context_fn` of `torch.utils.checkpoint`.
    """
    replay = _replay.get()
    return nullcontext(), nullcontext() if replay is None else replay()


class _Choice(TorchFunctionMode):
    """Intercepts a router's `topk` call, and replaces the chosen experts by those that `choose` returns."""

    def __init__(self, experts: int, choose: Callable[[Tensor], Tensor], *, alone: bool) -> None:
        super().__init__()
        self._experts, self._choose = experts, choose
        # If outer contexts acted in a recomputation, it would save more tensors than the first pass did, and
        # torch would raise an error.
        self._unseen: Callable[[], AbstractContextManager[None]] = (
            torch._C.DisableTorchFunction if alone else nullcontext
        )

    def begin(self, *_: Any) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self, *_: Any) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _TOPK or args[0].dim() != 2 or args[0].shape[1] != self._experts:
            return func(*args, **(kwargs or {}))  # such as the choice of groups of experts
        with self._unseen():
            found = func(*args, **(kwargs or {}))
        chosen_Tk = self._choose(found.indices)
        if chosen_Tk is found.indices:
            return found
        return torch.return_types.topk((args[0].gather(1, chosen_Tk), chosen_Tk))
