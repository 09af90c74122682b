"""Reads and writes the adapters of a checkpoint in peft's file layout.

Only `read_settings` imports peft, because the import takes half a second.
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from trainer_backend.errors import CheckpointError
from trainer_backend.models.origin import BELOW, plain_name, text_name

if TYPE_CHECKING:
    from peft import LoraConfig

FOLDER = "adapter"
ADAPTER = "default"  # peft's name for a model's only adapter
WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
_OF_PEFT = "base_model.model."


def take_out(model: PreTrainedModel, folder: Path) -> None:
    """Subtract the adapters in `folder` from a float32 model into which they were merged."""
    add_adapters(model, folder, sign=-1.0)


@torch.no_grad()
def add_adapters(model: PreTrainedModel, folder: Path, *, sign: float = 1.0) -> None:
    """Add the adapters in `folder` to the weights of their float32 base model.

    With `sign` -1 the adapters are subtracted. Raises CheckpointError if they belong to another model.
    """
    stored = read_adapter(folder)
    settings = read_settings(folder)
    for name, down in stored.items():
        if ".lora_A." not in name:
            continue
        up = stored[name.replace(".lora_A.", ".lora_B.")]
        try:
            own = _find_adapted_weight(model, name.partition(".lora_A.")[0], settings)
            weight = model.get_parameter(own)
            scaling = settings.lora_alpha / settings.r
            if weight.dim() == 3:
                experts = model.get_submodule(own.rpartition(".")[0])
                # True if the tensor is [E, in, out], False if it is [E, out, in]; peft tests it in this way.
                is_by_input = bool(getattr(experts, "is_transposed", False))
                learned = expert_delta(down, up, settings.r, scaling, is_by_input)
            else:
                learned = delta(down, up, scaling)
            weight.add_(learned, alpha=sign)
        except (AttributeError, RuntimeError) as error:  # no such layer; another shape
            raise CheckpointError(f"{folder}: the adapters belong to another model: {error}") from error


def _find_adapted_weight(model: PreTrainedModel, layer: str, settings: "LoraConfig") -> str:
    """Return the name of the weight, in a model without peft, to which the stored adapter `layer` belongs.

    The experts of a layer are several tensors of one module. peft wraps this module once for each adapted
    tensor, and the wrapper of the last tensor is the outermost. The name `layer` contains ".base_layer" once
    for each wrapper further outside, so this number determines the tensor.
    """
    name = plain_name(layer)
    own = (f"{name}.{part}" for part, _ in model.get_submodule(name).named_parameters(recurse=False))
    adapted = [part for part in own if part in (settings.target_parameters or ())]
    return adapted[-1 - layer.count(BELOW)] if adapted else f"{name}.weight"


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """Read the tensors that `Adapter.save` wrote, and return them by their parameter names in the model.

    Raises CheckpointError if `folder` contains no readable adapters.
    """
    if not (folder / SETTINGS).is_file():
        raise CheckpointError(
            f"{folder}: no adapter in this checkpoint, but the job has [lora]",
            hint="[lora] cannot be added to a run; start a new run.",
        )
    try:
        stored = load_file(folder / WEIGHTS)
    except Exception as error:  # safetensors raises one untyped error for all broken files
        raise CheckpointError(f"{folder}: the adapter cannot be read: {error}") from error
    return {
        text_name(name.removeprefix(_OF_PEFT)).removesuffix(".weight") + f".{ADAPTER}.weight": tensor
        for name, tensor in stored.items()
    }


def read_settings(folder: Path) -> "LoraConfig":
    """Read the config of the adapters in `folder`, and name its layers as in the model in training."""
    from peft import LoraConfig

    settings: LoraConfig = LoraConfig.from_pretrained(str(folder))
    if isinstance(settings.target_modules, set | list):
        settings.target_modules = [text_name(name) for name in settings.target_modules]
    if settings.target_parameters:
        settings.target_parameters = [text_name(name) for name in settings.target_parameters]
    return settings


def rename_for_wrapper(folder: Path, decoder: str) -> None:
    """Rename the layers of stored adapters, so that they fit a model that wraps the trained text model.

    The wrapper is, for example, a vision-language model that contains the text model as its module `decoder`
    (`Origin.decoder`). `target_modules` then lists full names of layers, because name endings would also
    match layers of a vision tower. Without a wrapper, `decoder` is "model", and nothing is changed.
    """
    if decoder == "model":
        return
    own, theirs = f"{_OF_PEFT}model.", f"{_OF_PEFT}{decoder}."
    stored = {theirs + name.removeprefix(own): x for name, x in load_file(folder / WEIGHTS).items()}
    settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    layers = {name.removeprefix(_OF_PEFT).partition(".lora_")[0] for name in stored}
    settings["target_modules"] = sorted(
        layer for layer in layers if not plain_name(layer).endswith(".experts")
    )
    if experts := settings.get("target_parameters"):
        settings["target_parameters"] = [f"{decoder}.{name.removeprefix('model.')}" for name in experts]
    save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2), encoding="utf-8")


def write_for_transformers(folder: Path, own: Path, base: Path) -> None:
    """Write adapters into `folder` that transformers and peft can load on top of the model in `base`.

    `own` contains the current adapters A_n, B_n, which `Adapter.save` wrote. The weights in `base` already
    include the adapters of that checkpoint, A_0 and B_0. Therefore the written adapters contain only the
    difference between B_n A_n and B_0 A_0. They have twice the rank and the same scale:

        B_n A_n - B_0 A_0 = [B_n, -B_0] [A_n; A_0]

    Without a warm-up, B_0 is 0, and the adapters are written unchanged. The written config contains the
    absolute path of `base`, because transformers resolves relative paths against its working directory.
    """
    stored, before = load_file(own / WEIGHTS), load_file(base / FOLDER / WEIGHTS)
    settings = json.loads((own / SETTINGS).read_text(encoding="utf-8"))
    if any(bool(before[name].any()) for name in before if ".lora_B." in name):
        rank = settings["r"]
        stored = {
            name: torch.cat(
                [part.reshape(len(part), rank, -1) for part in (tensor, -before[name])], 1
            ).flatten(1)
            if ".lora_B." in name
            else torch.cat(
                [part.reshape(-1, rank, part.shape[1]) for part in (tensor, before[name])], 1
            ).flatten(0, 1)
            for name, tensor in stored.items()
        }
        settings |= {"r": 2 * settings["r"], "lora_alpha": 2 * settings["lora_alpha"]}
    settings["base_model_name_or_path"] = str(base.resolve())
    save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2), encoding="utf-8")


def refuse_adapters(checkpoint: Path) -> None:
    """Raise CheckpointError if `checkpoint` contains adapters; called for a job without [lora].

    The optimizer moments of such a checkpoint belong to the adapters, so they do not fit the full weights.
    """
    if (checkpoint / FOLDER).is_dir():
        raise CheckpointError(
            f"{checkpoint}: it has adapters, but the job has no [lora]",
            hint="[lora] cannot be removed from a run; `turnwise merge` writes the model for a new run.",
        )


def refuse_other_settings(folder: Path, ours: "LoraConfig", layers: Collection[str]) -> None:
    """Raise CheckpointError if the adapters in `folder` differ from `ours` in rank, alpha or adapted layers.

    `layers` are the full names of the linear layers that `ours` adapts.
    """
    theirs = read_settings(folder)
    if set(theirs.target_modules or ()) == set(layers):
        theirs.target_modules = ours.target_modules
    for key, field in (
        ("rank", "r"), ("alpha", "lora_alpha"),
        ("target_modules", "target_modules"), ("target_modules", "target_parameters"),
    ):  # fmt: skip
        own, stored = _plain(getattr(ours, field)), _plain(getattr(theirs, field))
        if own != stored:
            raise CheckpointError(
                f"{folder}: its adapters have {key} {_shorten(stored)}, but lora.{key} of the job gives "
                f"{_shorten(own)}",
                hint="The [lora] of a run cannot be changed.",
            )


def delta(down: Tensor, up: Tensor, scaling: float) -> Tensor:
    """Compute the scaled product of the matrices `up` (B) and `down` (A) in float32.

    The product is computed on the CPU, so that it does not depend on the device. `scaling` is alpha / rank.
    """
    return up.float().cpu() @ down.float().cpu() * scaling


def expert_delta(down: Tensor, up: Tensor, rank: int, scaling: float, is_by_input: bool) -> Tensor:
    """Compute the scaled product B A of each of E experts: [E, out, in], or with `is_by_input` [E, in, out].

    `down` is peft's A [E * rank, in]; `up` is peft's B [out, rank * E].
    """
    downs = down.float().cpu().reshape(-1, rank, down.shape[1])
    ups = up.float().cpu().reshape(len(up), rank, -1).permute(2, 0, 1)
    learned: Tensor = ups @ downs * scaling
    return learned.transpose(1, 2) if is_by_input else learned


def _plain(setting: Any) -> Any:
    """Convert a collection of layer names to a sorted list; return any other setting unchanged.

    peft keeps such names as a set, and stores them as a list.
    """
    return sorted(setting) if isinstance(setting, set | list | tuple) else setting


def _shorten(setting: Any) -> str:
    """Format a setting as text; of a list with more than four names, only the first two are shown."""
    is_long = isinstance(setting, list) and len(setting) > 4
    return f"{', '.join(setting[:2])} and {len(setting) - 2} more" if is_long else str(setting)
