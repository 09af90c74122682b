"""The shapes of the small models that `model.preset` names. No torch: a job is checked against them."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Preset:
    """The shape of a preset. Key and value heads equal the query heads: no repetition in attention.

    A head has 32 numbers at least: the fewest that attention of vLLM on a CPU takes, so a checkpoint runs
    there too.
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
        # For a GPU, where each layer costs kernels to start in every pass: few layers, and wide ones.
        "small-26m": Preset(width=512, layers=6, heads=8, head_dim=64, mlp_width=2048),
    }
)
