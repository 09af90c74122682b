"""Reads and writes a checkpoint's adapters in peft's layout, without importing peft (half a second)."""

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
    """Subtract stored adapters from a float32 model into which they were merged."""
    add_adapters(model, folder, sign=-1.0)


@torch.no_grad()
def add_adapters(model: PreTrainedModel, folder: Path, *, sign: float = 1.0) -> None:
    """Add stored adapters to their float32 base model; sign -1 subtracts them."""
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
                # Whether the tensor is [E, in, out] and not [E, out, in], as peft tests it.
                is_by_input = bool(getattr(experts, "is_transposed", False))
                learned = expert_delta(down, up, settings.r, scaling, is_by_input)
            else:
                learned = delta(down, up, scaling)
            weight.add_(learned, alpha=sign)
        except (AttributeError, RuntimeError) as error:  # no such layer; another shape
            raise CheckpointError(f"{folder}: the adapters belong to another model: {error}") from error


def _find_adapted_weight(model: PreTrainedModel, layer: str, settings: "LoraConfig") -> str:
    """Find the weight of a plain model that the adapter `layer` adapts; return its name.

    A layer's experts are several tensors of one module. peft wraps it once per tensor; the last is outermost.
    """
    name = plain_name(layer)
    own = (f"{name}.{part}" for part, _ in model.get_submodule(name).named_parameters(recurse=False))
    adapted = [part for part in own if part in (settings.target_parameters or ())]
    return adapted[-1 - layer.count(BELOW)] if adapted else f"{name}.weight"


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """Read the tensors that `Adapter.save` wrote, by their names in the model."""
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
    """Read the settings of stored adapters, with the layers' names in the trained model."""
    from peft import LoraConfig

    settings: LoraConfig = LoraConfig.from_pretrained(str(folder))
    if isinstance(settings.target_modules, set | list):
        settings.target_modules = [text_name(name) for name in settings.target_modules]
    if settings.target_parameters:
        settings.target_parameters = [text_name(name) for name in settings.target_parameters]
    return settings


def rename_for_wrapper(folder: Path, decoder: str) -> None:
    """Rename a text model's adapters as in its wrapper, such as a vision-language model (`Origin.decoder`).

    Layers get their full names, because name endings would match layers of a vision tower too.
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
    """Write adapters into `folder` for transformers with peft, over the plain model in `base`.

    The plain model is W + d_0, with the adapters of `base` merged. So the difference d_n - d_0 is written,
    as adapters of twice the rank and the same scale:

        B_n A_n - B_0 A_0 = [B_n, -B_0] [A_n; A_0]

    Without a warm-up, B_0 is 0, and the adapters are written unchanged. `own` is the folder with the adapters
    that `Adapter.save` wrote. The path of `base` is absolute, because transformers resolves relative paths
    against its working directory.
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
    """Refuse a checkpoint with adapters for a job without [lora]: its moments belong to other weights."""
    if (checkpoint / FOLDER).is_dir():
        raise CheckpointError(
            f"{checkpoint}: it has adapters, but the job has no [lora]",
            hint="[lora] cannot be removed from a run; `turnwise merge` writes the model for a new run.",
        )


def refuse_other_settings(folder: Path, ours: "LoraConfig", layers: Collection[str]) -> None:
    """Refuse adapters of another rank, scale or set of layers; `layers` names the layers of `ours`."""
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
    """Compute (alpha / rank) * B A in float32, always on the CPU, so that all devices give the same sum."""
    return up.float().cpu() @ down.float().cpu() * scaling


def expert_delta(down: Tensor, up: Tensor, rank: int, scaling: float, is_by_input: bool) -> Tensor:
    """Compute the delta [E, out, in] or [E, in, out] from peft's A [E * rank, in] and B [out, rank * E]."""
    downs = down.float().cpu().reshape(-1, rank, down.shape[1])
    ups = up.float().cpu().reshape(len(up), rank, -1).permute(2, 0, 1)
    learned: Tensor = ups @ downs * scaling
    return learned.transpose(1, 2) if is_by_input else learned


def _plain(setting: Any) -> Any:
    """Sort names of layers: peft keeps them as a set, and stores them as a list."""
    return sorted(setting) if isinstance(setting, set | list | tuple) else setting


def _shorten(setting: Any) -> str:
    """Describe a setting; a long list by its first names."""
    is_long = isinstance(setting, list) and len(setting) > 4
    return f"{', '.join(setting[:2])} and {len(setting) - 2} more" if is_long else str(setting)
