"""Load new weights into the engine's model, after checking all tensors."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer_backend.errors import ModelFolderError, WeightsRefused
from trainer_backend.inference.actor import WeightSource
from trainer_backend.models.layout import KEPT, weight_files
from trainer_backend.models.origin import from_stored, plain_name

NAMES_IN_A_MESSAGE = 3
# The part of a name that marks an adapter's weights in peft.
OF_AN_ADAPTER = ".lora_"


def read_weights(source: WeightSource) -> Mapping[str, Tensor]:
    """Return the tensors of a source: of a mapping, or of a model folder on disk."""
    if isinstance(source, Mapping):
        return source
    folder = Path(source)
    if not folder.is_dir():
        raise WeightsRefused("no such folder", where=str(folder))
    try:
        files = [file for file in weight_files(folder) if file.name != KEPT]
    except ModelFolderError as error:
        raise WeightsRefused(error.detail, where=error.where, hint=error.hint) from error
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except Exception as error:  # safetensors has one untyped error for every damaged file
            raise WeightsRefused(f"the file cannot be read: {error}", where=str(file)) from error
    return tensors


class ServedWeights:
    """Replaces the weights of an engine's model.

    A load may replace only the adapters of the model, since a run does not train their base. A load of a
    whole model, such as a merged checkpoint, replaces the base and sets the adapters to 0. After such a load,
    adapters without their base are refused, because they belong to the base with which the engine began.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._has_own_base = True

    @torch.no_grad()
    def replace(self, tensors: Mapping[str, Tensor]) -> None:
        """Check all `tensors`, and then copy them into the tensors of the model's `state_dict()`.

        If several names share memory (a tied head and its embedding), `tensors` needs only one of them.

        The model's tensors are overwritten because a GPU has no room for two models. If memory runs out
        during the copies, some tensors are still old: the model must not compute until a later call succeeds.

        Raises:
            WeightsRefused: the tensors do not fit; nothing was copied.
        """
        if isinstance(self._model, PreTrainedModel):
            tensors = from_stored(self._model, tensors)
        targets = self._model.state_dict()
        adapters = {name: tensor for name, tensor in targets.items() if OF_AN_ADAPTER in name}
        has_adapters = any(OF_AN_ADAPTER in name for name in tensors)
        is_whole = not has_adapters or any(OF_AN_ADAPTER not in name for name in tensors)
        if adapters and not is_whole and not self._has_own_base:
            raise WeightsRefused(
                "they are only adapters, and a whole model has replaced their base",
                hint="Load a merged checkpoint, or adapters together with their base.",
            )
        if not has_adapters:
            targets = {plain_name(name): tensor for name, tensor in targets.items() if name not in adapters}
        _refuse_misfits(tensors, targets, required=targets if is_whole else adapters)
        # Set before the first copy: a later copy may fail.
        self._has_own_base = not is_whole
        for name, tensor in tensors.items():
            targets[name].copy_(tensor)
        for tensor in () if has_adapters else adapters.values():
            tensor.zero_()
        self._has_own_base = has_adapters


def _refuse_misfits(
    tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor], required: Mapping[str, Tensor]
) -> None:
    known = [(name, tensor, targets[name]) for name, tensor in tensors.items() if name in targets]
    memory = {own.data_ptr() for _, _, own in known}
    faults = {
        "missing": [name for name, tensor in required.items() if tensor.data_ptr() not in memory],
        "unknown": [name for name in tensors if name not in targets],
        "of another shape": [
            f"{name} {tuple(new.shape)} for {tuple(own.shape)}"
            for name, new, own in known
            if new.shape != own.shape
        ],
        "of another type": [
            f"{name} {new.dtype} for {own.dtype}"
            for name, new, own in known
            if new.is_floating_point() != own.is_floating_point()
        ],
    }
    for what, names in faults.items():
        if names:
            more = f" and {len(names) - NAMES_IN_A_MESSAGE} more" if len(names) > NAMES_IN_A_MESSAGE else ""
            raise WeightsRefused(f"tensors {what}: {', '.join(names[:NAMES_IN_A_MESSAGE])}{more}")
