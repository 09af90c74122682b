"""What a GPU could do, and what a model needs of it: arithmetic for bench/gpu.py. No torch.

Matrix products alone are counted, each multiplication with its addition as 2, nothing that is computed twice:

    forward   2 * W a token  +  2 * n^2 * heads * head_dim a layer for a segment of n tokens
              +  2 * (V * D + M) a sampled token

W are the weights of the layers' products but for M, those of the last layer except its keys and values: only
what predicts a sampled token is read of it. Causal attention needs half of its n x n scores, for q k^T and
for p v. A backward pass costs two forward passes; of adapters' frozen base, only the one to its inputs.

    MFU       FLOPs of an update / (its seconds * peak FLOP/s)

Source: Chowdhery et al., PaLM, arXiv:2204.02311, appendix B, which counts all scores and every token to the
end, as we do not.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from trainer_backend.learner.shapes import BFLOAT16, ModelShape


@dataclass(frozen=True, slots=True)
class Peak:
    """flops: of dense bfloat16 products with float32 sums, FLOP/s. bandwidth: of its memory, bytes/s."""

    flops: float
    bandwidth: float


# By words of torch.cuda.get_device_name, the narrower name first. Source: NVIDIA's data sheets, without
# sparsity; A10G: AWS, of its G5 instances; GeForce: the white papers of Ada and Ampere GA102.
PEAKS = {
    "B200": Peak(2250e12, 8.0e12),
    "H200 NVL": Peak(835e12, 4.8e12),
    "H200": Peak(989.4e12, 4.8e12),
    "H100 NVL": Peak(835e12, 3.9e12),
    "H100 PCIe": Peak(756e12, 2.0e12),
    "H100": Peak(989.4e12, 3.35e12),
    "A100 80GB PCIe": Peak(312e12, 1.935e12),
    "A100-SXM4-80GB": Peak(312e12, 2.039e12),
    "A100": Peak(312e12, 1.555e12),
    "L40S": Peak(362e12, 0.864e12),
    "L4": Peak(121e12, 0.3e12),
    "A10G": Peak(70e12, 0.6e12),
    "A10": Peak(125e12, 0.6e12),
    "RTX 4090": Peak(165.2e12, 1.008e12),
    "RTX 3090": Peak(71e12, 0.936e12),
}


# Words of devices with other peaks: slower sisters of the same name, and parts of a device.
OTHERS = {"Ti", "D", "SUPER", "Laptop", "MIG"}


def find_peak(device_name: str) -> Peak | None:
    """The peak of a device; None if it is not in the table."""
    if OTHERS & set(device_name.split()):
        return None
    return next(
        (peak for name, peak in PEAKS.items() if re.search(rf"\b{re.escape(name)}\b", device_name)), None
    )


def layer_weights(shape: ModelShape) -> int:
    """Weights of all layers' matrix products: q and o, k and v, the MLP's three."""
    attention = 2 * shape.width * (shape.heads + shape.kv_heads) * shape.head_dim
    return shape.layers * (attention + 3 * shape.width * shape.mlp_width)


def forward_flops(shape: ModelShape, lengths: Sequence[int], sampled: int) -> float:
    """FLOPs of one forward pass over segments of these lengths.

    Args:
        sampled: tokens whose predictions are read.
    """
    return float(sum(_forward(shape, lengths, sampled)))


def update_flops(shape: ModelShape, lengths: Sequence[int], sampled: int) -> float:
    """FLOPs of an update by one optimizer step over segments of these lengths, which it scores itself.

    Args:
        sampled: tokens of all of them that are trained.
    """
    base, attention, adapters = _forward(shape, lengths, sampled)
    backward = (1 if shape.adapters else 2) * base + 2 * (attention + adapters)
    return float(base + attention + adapters + backward)


def _forward(shape: ModelShape, lengths: Sequence[int], sampled: int) -> tuple[int, int, int]:
    """Of the base's products, of attention, of adapters."""
    tokens = sum(lengths)
    last = shape.width * (3 * shape.mlp_width + 2 * shape.heads * shape.head_dim)
    base = 2 * (layer_weights(shape) - last) * tokens
    base += 2 * (last + shape.vocabulary * shape.width) * sampled
    attention = 2 * shape.layers * shape.heads * shape.head_dim * sum(n * n for n in lengths)
    return base, attention, 2 * shape.adapters * tokens


def decode_seconds(shape: ModelShape, peak: Peak, *, rows: int, cached: float) -> float:
    """The least seconds of a decode step: the time to read all weights once, and the cache of every row.

    Args:
        rows: requests that are decoded together.
        cached: tokens that a row has in the cache, their mean over the steps.
    """
    weights = layer_weights(shape) + shape.vocabulary * shape.width + shape.adapters
    keys_and_values = shape.cached_numbers * cached * rows
    return BFLOAT16 * (weights + keys_and_values) / peak.bandwidth
