"""The shapes of the small models that `model.preset` names, in a file that does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Preset:
    """The shape of a small transformer, with as many key and value heads as query heads.

    `head_dim` is at least 32, the smallest head dimension that vLLM supports on a CPU.
    """

    width: int
    layers: int
    heads: int
    head_dim: int
    mlp_width: int
    max_positions: int = 2048


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "tiny-0.3m": Preset(width=96, layers=2, heads=3, head_dim=32, mlp_width=256),
        "tiny-0.8m": Preset(width=128, layers=3, heads=4, head_dim=32, mlp_width=384),
        # Few, wide layers, because on a GPU every layer costs kernel launches.
        "small-26m": Preset(width=512, layers=6, heads=8, head_dim=64, mlp_width=2048),
    }
)
