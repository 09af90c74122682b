"""Read the weights of a version: a model folder, or a base model into which adapters are merged.

    W = W_0 + (alpha / rank) * B A        A [rank, in], B [out, rank]

W_0 is a weight of the base, and A and B are the matrices of its adapter, in peft's layout. The sum is
computed in float32; the caller rounds it once. This file runs in vLLM's own environment and imports nothing
of Turnwise or vLLM.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

_OF_THE_WRAPPER, _DOWN, _UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def tensors(folder: Path, files: Sequence[str], adapter: Path | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, value) of each weight in the folder's `files`; no other file of the folder is read.

    `adapter` is the folder of adapters to merge into these weights, or None.

    Raises:
        ValueError: an adapter belongs to a weight that the `files` do not contain.
    """
    deltas = {} if adapter is None else _deltas(adapter)
    for file in files:
        with safe_open(folder / file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118
                tensor = stored.get_tensor(name)
                if name in deltas:
                    down, up, scale = deltas.pop(name)
                    tensor = tensor.float() + up.float() @ down.float() * scale
                yield name, tensor
    if deltas:
        raise ValueError(f"{folder} has no {min(deltas)}, of which {adapter} has an adapter")


def _deltas(folder: Path) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Return (A, B, alpha / rank) for each weight with an adapter, by the weight's name in the model."""
    settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    stored = load_file(folder / "adapter_model.safetensors")
    names = [name.removesuffix(_DOWN) for name in stored if name.endswith(_DOWN)]
    scale = settings["lora_alpha"] / settings["r"]
    return {
        f"{name.removeprefix(_OF_THE_WRAPPER)}.weight": (stored[name + _DOWN], stored[name + _UP], scale)
        for name in names
    }
