"""The peak speed of GPUs, and the FLOPs that a model needs: arithmetic for bench/gpu.py. No torch.

Only matrix products are counted, a multiplication and its addition as 2; no recomputation is counted:

    forward   2 * W a token  +  2 * n^2 * heads * head_dim a layer for a segment of n tokens
              +  2 * (V * D + M) a sampled token

M are the weights of the last layer's products except for keys and values; they are needed only for tokens
whose prediction is read. W are the weights of all other layer products. Causal attention needs half of its
n x n scores, for q k^T and for p v. A backward pass costs two forward passes, or one through frozen weights.

    MFU       FLOPs of an update / (its seconds * peak FLOP/s)

Source: Chowdhery et al., PaLM, arXiv:2204.02311, appendix B. Unlike us, it counts all n x n scores, and the
last layer and the predictions of every token.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from trainer_backend.learner.shapes import BFLOAT16, ModelShape


@dataclass(frozen=True, slots=True)
class Peak:
    """`flops` (FLOP/s) of dense bfloat16 products with float32 sums, and `bandwidth` of memory (bytes/s)."""

    flops: float
    bandwidth: float


# Peaks by words of torch.cuda.get_device_name; a narrower name comes first. Source: NVIDIA's data sheets,
# without sparsity; A10G: AWS's page of G5 instances; GeForce: the white papers of Ada and Ampere GA102.
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


# Words in names of devices without a peak here: slower variants of a listed device, and parts of a device.
OTHERS = {"Ti", "D", "SUPER", "Laptop", "MIG"}


def find_peak(device_name: str) -> Peak | None:
    """Return the peak of a device; None if it is not in the table."""
    if OTHERS & set(device_name.split()):
        return None
    return next(
        (peak for name, peak in PEAKS.items() if re.search(rf"\b{re.escape(name)}\b", device_name)), None
    )


def layer_weights(shape: ModelShape) -> int:
    """Return the number of weights in all layers' matrix products: q and o, k and v, the MLP's three."""
    attention = 2 * shape.width * (shape.heads + shape.kv_heads) * shape.head_dim
    return shape.layers * (attention + 3 * shape.width * shape.mlp_width)


def forward_flops(shape: ModelShape, lengths: Sequence[int], sampled: int) -> float:
    """Return the FLOPs of one forward pass over segments of these lengths.

    Args:
        sampled: tokens whose predictions are read.
    """
    return float(sum(_forward(shape, lengths, sampled)))


def update_flops(shape: ModelShape, lengths: Sequence[int], sampled: int) -> float:
    """Return the FLOPs of an optimizer step over segments of these lengths: a forward and a backward pass.

    Args:
        sampled: trained tokens of all segments.
    """
    base, attention, adapters = _forward(shape, lengths, sampled)
    backward = (1 if shape.adapters else 2) * base + 2 * (attention + adapters)
    return float(base + attention + adapters + backward)


def _forward(shape: ModelShape, lengths: Sequence[int], sampled: int) -> tuple[int, int, int]:
    """Return the FLOPs of the base model's products, of attention, and of adapters."""
    tokens = sum(lengths)
    last = shape.width * (3 * shape.mlp_width + 2 * shape.heads * shape.head_dim)
    base = 2 * (layer_weights(shape) - last) * tokens
    base += 2 * (last + shape.vocabulary * shape.width) * sampled
    attention = 2 * shape.layers * shape.heads * shape.head_dim * sum(n * n for n in lengths)
    return base, attention, 2 * shape.adapters * tokens


def decode_seconds(shape: ModelShape, peak: Peak, *, rows: int, cached: float) -> float:
    """Return the least seconds of a decode step, which reads all weights once, and the cache of every row.

    Args:
        rows: requests that are decoded together.
        cached: tokens of a row in the cache, as a mean over the steps.
    """
    weights = layer_weights(shape) + shape.vocabulary * shape.width + shape.adapters
    keys_and_values = shape.cached_numbers * cached * rows
    return BFLOAT16 * (weights + keys_and_values) / peak.bandwidth
